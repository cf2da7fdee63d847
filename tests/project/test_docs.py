"""The pages are correct: links resolve, snippets and commands are valid, named settings and error classes exist."""

import ast
import builtins
import difflib
import importlib
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import ray.exceptions
import ray.train
import ray.train.base_trainer
import ray.train.v2._internal.exceptions
import ray.tune.error
import torch
import torch.distributed as dist

from ray_fracbackend import FracTorchConfig, errors, ipc
from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.cli.parser import parser
from ray_fracbackend.decide.settings import setting_names
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.start.failure import merge
from tests.processes import free_port

_ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
_PAGES = sorted([*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")])


def name_of(page):
    return str(page.relative_to(_ROOT))


_each_page = pytest.mark.parametrize("page", _PAGES, ids=name_of)

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")
_FILE = re.compile(
    r"`((?:benchmarks|ci|docs|examples|ray_fracbackend|tests|upstream)/[\w./-]+\.(?:py|md|jsonl?|sh|png|svg)\b)"
)


def prose(page):
    """Return a page without its code blocks, in which brackets are not links."""
    return _FENCE.sub("", page.read_text())


def anchors(page):
    """Return the anchors of a page's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@_each_page
def test_links(page):
    """Every relative link leads to an existing file and heading."""
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
    """Every file that a page names exists."""
    assert [name for name in _FILE.findall(page.read_text()) if not (_ROOT / name).exists()] == []


@_each_page
def test_python_snippets(page):
    for _, language, code in _FENCE.findall(page.read_text()):
        if language == "python":
            ast.parse(code)


_BLOCK = re.compile(r"^<!-- (file|part|diff): ([^\n]+) -->\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@_each_page
def test_blocks_of_files(page):
    """A block after ``<!-- file: NAME -->`` is that file, after ``part`` lines of it, after ``diff`` what differs in two."""
    for kind, names, code in _BLOCK.findall(page.read_text()):
        old, *new = [(_ROOT / name).read_text() for name in names.split()]
        if kind == "part":
            lines = {line.strip() for line in old.splitlines()}
            assert [line for line in code.splitlines() if line.lstrip("+ ") not in lines] == []
        else:
            assert code == (difference(old, *new) if new else old)


def difference(old, new):
    """Return the lines that differ between two files below their docstrings, without the headers of a patch."""
    lines = [text.partition('"""\n\n')[2].splitlines(keepends=True) for text in (old, new)]
    hunks = list(difflib.unified_diff(*lines, n=2))[3:]
    return "".join("...\n" if line.startswith("@@") else line for line in hunks)


def config_calls(page):
    """``FracTorchConfig(...)`` wherever a page has it, with the text after it in the line; `...` as a value is left out."""
    text = re.sub(r"^[+-](?= )", " ", page.read_text(), flags=re.MULTILINE)  # a call may be lines of a diff
    for found in re.finditer(r"(?<![\w.])FracTorchConfig\(", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        call = ast.parse(text[found.start() : end], mode="eval").body
        names = {keyword.arg for keyword in call.keywords}
        values = {each.arg: literal(each.value) for each in call.keywords if ast.unparse(each.value) != "..."}
        positional = [literal(argument) for argument in call.args if ast.unparse(argument) != "..."]
        yield names, positional, values, text[end:].split("\n")[0]


def literal(node):
    """Return the value of an argument in a page."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pytest.fail(f"FracTorchConfig(...) with {ast.unparse(node)}, which is no literal: write a value, or `...`")


@_each_page
def test_settings(page):
    """Every FracTorchConfig in a page is valid, or invalid if an error follows it."""
    for names, positional, values, after in config_calls(page):
        assert names <= set(setting_names())
        with pytest.raises(ValueError) if after.startswith(": ") else nullcontext():  # noqa: PT011 (any text)
            FracTorchConfig(*positional, **values)


_SCRIPT = re.compile(r"# (\S+\.py), run as: (.+)\n")


@pytest.mark.full
def test_scripts_run(tmp_path):
    """A Python snippet that says how to run it runs as it says; one of them without Ray."""
    (tmp_path / "ray.py").write_text("raise ImportError('there is no Ray here')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT)])}
    environment["PET_MASTER_PORT"] = str(free_port())  # torchrun's default port is the same for all
    found = 0
    for page in _PAGES:
        for _, _, code in _FENCE.findall(page.read_text()):
            if script := _SCRIPT.match(code):
                found += 1
                (tmp_path / script[1]).write_text(code)
                words = [str(_BIN / word) if (_BIN / word).exists() else word for word in shlex.split(script[2])]
                done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
                if "check_devices(" in code and not torch.cuda.is_available():
                    assert "MissingDeviceError: ranks 0,1 cannot use a CUDA device" in done.stderr
                    continue
                assert done.returncode == 0, done.stderr
                if "print(verify_process_group(" in code:
                    assert done.stdout.count("(backend='gloo', device='cpu', world_size=2") == 2, done.stdout
    assert found


@_each_page
def test_commands(page):
    """Every command line of ray-fracbackend in a page is valid."""
    for line in re.findall(r"(?:^    |`)ray-fracbackend ([a-z][^`\n#]*)", page.read_text(), flags=re.MULTILINE):
        if (words := shlex.split(line)) and (len(words) > 1 or words[0] in ("demo", "doctor")):
            parser().parse_args(words)


def known_errors():
    """Return names of exceptions that a page may name: ours, Python's, and those of Ray and torch that users see."""
    modules = [errors, merge, ipc, builtins, subprocess, dist, ray.exceptions, ray.train, ray.train.base_trainer]
    modules += [ray.tune.error, ray.train.v2._internal.exceptions]
    modules += [importlib.import_module("ray.train.v2.api.exceptions")] if v2_enabled() else []
    return {name for module in modules for name in dir(module)}


@_each_page
def test_error_classes(page):
    assert set(re.findall(r"`([A-Z]\w+Error)\b", page.read_text())) - known_errors() == set()


def test_every_error_has_a_section():
    """docs/troubleshooting.md has a section for each error class of the package."""
    ours = {
        name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, FracBackendError)
    }
    headings = re.findall(r"^## (\w+Error)$", (_ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert ours - set(headings) == set()


def test_settings_table():
    """docs/settings.md lists every setting with its default, and the class's docstring has a line for each."""
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", (_ROOT / "docs" / "settings.md").read_text(), flags=re.MULTILINE)
    defaults = [(name, getattr(FracTorchConfig(), name)) for name in setting_names()]
    assert [(name, ast.literal_eval(value)) for name, value in rows] == defaults
    assert (*re.findall(r"^ {8}([a-z_]+): ", FracTorchConfig.__doc__, flags=re.MULTILINE),) == setting_names()
