"""What the pages show is true: their links lead somewhere, their snippets are valid, quoted messages are the code's own."""

import ast
import re
from pathlib import Path

import pytest

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.facts import NetworkFacts
from ray_fracbackend.options import StartOptions, setting_names
from ray_fracbackend.plan import plan_start
from tests.unit.builders import gpu, job, worker

_ROOT = Path(__file__).parents[2]
_PAGES = sorted([*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")])
_each_page = pytest.mark.parametrize("page", _PAGES, ids=lambda path: str(path.relative_to(_ROOT)))

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")
_FILE = re.compile(
    r"`((?:benchmarks|ci|docs|examples|ray_fracbackend|tests|upstream)/[\w./-]+\.(?:py|md|jsonl?|sh|png|svg)\b)"
)


def prose(page):
    """A page without its code blocks, in which brackets are no links."""
    return _FENCE.sub("", page.read_text())


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@_each_page
def test_links(page):
    """Every relative link leads to a file of the repository, and to a heading that it has."""
    dead = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@_each_page
def test_named_files(page):
    """Every file of the repository that a page names is there."""
    assert [name for name in _FILE.findall(page.read_text()) if not (_ROOT / name).exists()] == []


@_each_page
def test_python_snippets(page):
    """Every Python snippet is valid Python."""
    for _, language, code in _FENCE.findall(page.read_text()):
        if language == "python":
            ast.parse(code)


def config_calls(page):
    """``FracTorchConfig(...)`` wherever a page has it, with the text after it in the line; `...` as a value is left out."""
    text = page.read_text()
    for found in re.finditer(r"(?<![\w.])FracTorchConfig\(", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        call = ast.parse(text[found.start() : end], mode="eval").body
        values = {
            keyword.arg: keyword.value
            for keyword in call.keywords
            if not (isinstance(keyword.value, ast.Constant) and keyword.value.value is ...)
        }
        names = {keyword.arg for keyword in call.keywords}
        positional = [argument for argument in call.args if ast.unparse(argument) != "..."]
        yield names, [ast.literal_eval(argument) for argument in positional], values, text[end:].split("\n")[0]


@_each_page
def test_settings(page):
    """Every FracTorchConfig that a page shows can be made; one with an error's text after it raises that error."""
    for names, positional, values, after in config_calls(page):
        assert names <= set(setting_names())
        settings = {name: ast.literal_eval(value) for name, value in values.items()}
        if after.startswith(": "):
            with pytest.raises(ValueError, match=re.escape(after.removeprefix(": "))):
                FracTorchConfig(*positional, **settings)
        else:
            FracTorchConfig(*positional, **settings)


_SHARED = job(gpu("ab12cd34"), gpu("ab12cd34"), node="3")
_MODE = gpu("ab12cd34", compute_mode="exclusive_process")
_WSL = "this is Windows Subsystem for Linux, where CUDA memory cannot be shared between processes"
_NO_GLOO = (
    "torch 2.9.1 on win32 has no Gloo transport (unsupported gloo device). The Windows wheels of torch 2.8.0 to 2.10.0 were "
    "built without one; install torch 2.7.1 or older, or 2.11.0 or newer"
)


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (_SHARED, {"on_shared_device": "error"}),
        (_SHARED, {"on_shared_device": "nccl"}),
        (job(_MODE, _MODE, node="3"), {}),
        (job(gpu(compute_mode="prohibited")), {}),
        (job(gpu(), gpu(), node="3", cuda_missing="torch 2.13.0+cpu is a CPU-only build"), {}),
        (job(None), {"backend": "nccl"}),
        ([worker(0, gpu("a")), worker(1, gpu("b"), nccl_version=(2, 27, 3))], {}),
        ([worker(0), worker(1, platform="win32")], {}),
        (job(gpu(), gpu(), node="3", pid=4711, ipc_device_memory_missing=_WSL), {"on_shared_device": "ipc"}),
        (job(None, node_ip="127.0.0.1", pid=4711, network=NetworkFacts(gloo_missing=_NO_GLOO)), {}),
    ],
)
def test_quoted_errors(workers, settings):
    """The errors of the decision stand in docs/errors.md, under the class that they have, word for word."""
    with pytest.raises(FracBackendError) as caught:
        plan_start(workers, StartOptions(**settings))
    page = (_ROOT / "docs" / "errors.md").read_text()
    section = page.split(f"\n## {type(caught.value).__name__}\n")[1].split("\n## ")[0]
    assert f"    {caught.value}\n" in section


@pytest.mark.parametrize(("page", "folder"), [("architecture.md", ""), ("ipc.md", "ipc")])
def test_modules(page, folder):
    """Every module is in the table of its page."""
    named = set(re.findall(r"`(\w+)(?:\.py)?`", (_ROOT / "docs" / page).read_text()))
    modules = {path.stem for path in (_ROOT / "ray_fracbackend" / folder).glob("[!_]*.py")}
    assert modules - named == set()


def test_quoted_log_line():
    """The README's log line is what the code says of such workers."""
    assert plan_start(_SHARED, StartOptions()).reason in (_ROOT / "README.md").read_text()


def test_settings_table():
    """The README lists every setting with its default."""
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", (_ROOT / "README.md").read_text(), flags=re.MULTILINE)
    defaults = [(name, getattr(FracTorchConfig(), name)) for name in setting_names()]
    assert [(name, ast.literal_eval(value)) for name, value in rows] == defaults
