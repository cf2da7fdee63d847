"""Requirements of a release and of visitors: version, changelog, metadata, forms, and the first screen of README."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ray_fracbackend import __version__
from ray_fracbackend.cli.parser import parser
from tests.unit.test_error_texts import REFUSALS, torch_text

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "ci"))

import release  # noqa: E402
from commands import COMMANDS  # noqa: E402

_PROJECT = (_ROOT / "pyproject.toml").read_text()
_README = (_ROOT / "README.md").read_text()


def test_changelog_has_the_version():
    """The newest dated section is that of the version, below the unreleased section."""
    headings = re.findall(r"^## (.+)$", (_ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])


def test_install_page_has_the_version():
    """Every wheel that docs/install.md names is that of the version."""
    page = (_ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"ray_fracbackend-([\w.]+)-py3", page)) == {__version__}


def test_first_commands_of_readme():
    """The first command installs the package and runs the demo, the second installs and runs the tests."""
    commands = re.findall(r"^    (\S*python3? .+)$", _README, flags=re.MULTILINE)
    demo = "python3 -m venv .venv && .venv/bin/python -m pip install -c ci/constraints.txt '.[demo]' && .venv/bin/ray-fracbackend demo"
    assert commands[:2] == [demo, "python3 ci/test.py"]


def test_classifiers_match_the_runs():
    """The classifiers list the Python versions that passed in the matrix, and no system on which nothing ran."""
    rows = [json.loads(line) for line in (_ROOT / "ci" / "matrix_results.jsonl").read_text().splitlines()]
    passed = {row["python"] for row in rows if row["result"] == "passed"}
    assert set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', _PROJECT)) == passed
    assert re.findall(r'"Operating System :: (.+)"', _PROJECT) == ["POSIX :: Linux"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python 3.11")
def test_urls_are_not_invented():
    """Until the project has a public address the metadata contains none, and a comment states where to set it."""
    import tomllib

    urls = tomllib.loads(_PROJECT)["project"].get("urls")
    assert urls is None or all(url.startswith("https://") for url in urls.values())
    assert urls or "docs/development/releasing.md" in _PROJECT


def test_first_screen_of_readme():
    """The first 30 lines contain the errors that bring people here, as they appear on the screen."""
    lines = _README.splitlines()[:30]
    screen = "\n".join(line.strip() for line in lines)
    shown = torch_text(REFUSALS["2.28.9"])
    assert re.sub(r"in: \S+, invalid", "in: ..., invalid", shown) in screen.replace(
        "torch.distributed.DistBackendError: ", ""
    )
    assert REFUSALS["2.30.7"].split(". ")[0] in screen
    assert "PermissionError: [WinError 32]" in screen


def test_snippet_of_tune_is_the_example():
    """The Tune function of docs/tune.md is the one of the example, which tests/ray/test_tune.py runs."""
    page = (_ROOT / "docs" / "tune.md").read_text()
    (function,) = re.findall(r"```python\n(def fit_trial.+?)```", page, flags=re.DOTALL)
    assert function in (_ROOT / "examples" / "tune_fractional_gpus.py").read_text()


@pytest.mark.parametrize(
    "form", sorted((_ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms(form):
    """Every form has GitHub's required parts: a name, a description, and fields with unique ids."""
    content = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert set(content) <= {"blank_issues_enabled", "contact_links"}
        return
    assert content["name"]
    assert content["description"]
    ids = [field["id"] for field in content["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in content["body"])


def test_nothing_promises_an_index():
    """Without a public address in the metadata, no page or message claims that pip finds the package by its name."""
    if "[project.urls]\n" in _PROJECT:
        return
    files = [*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md"), *_ROOT.glob("ray_fracbackend/**/*.py")]
    promise = re.compile(r"(?:pip install (?:-U |--upgrade )?['\"]?|['\"]pip['\"]: \[['\"])ray[-_]fracbackend\b(?!-)")
    assert [str(file.relative_to(_ROOT)) for file in files if promise.search(file.read_text())] == []


def step(*arguments):
    """Run a step of the release as the workflow does."""
    command = [sys.executable, _ROOT / "ci" / "release.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)


def test_a_tag_that_is_not_the_version():
    """The tag of this version passes; another tag, or a changelog without its dated section, ends the release."""
    assert step("check-tag", f"v{__version__}").returncode == 0
    for wrong in (__version__, "v0.0.9", f"v{__version__}rc1"):
        done = step("check-tag", wrong)
        assert done.returncode == 1
        assert f"the tag must be v{__version__}" in done.stderr


@pytest.mark.parametrize(
    ("heading", "told"),
    [
        (f"## [{__version__}]", "it has 0"),
        (f"## [{__version__}] - soon", "the date of .* is soon"),
        (f"## [{__version__}] - 2026-13-01", "the date of .* is 2026-13-01"),
    ],
)
def test_a_changelog_without_the_date(heading, told, tmp_path, monkeypatch):
    """A section without a date, or with an invalid date."""
    (tmp_path / "ray_fracbackend").mkdir()
    (tmp_path / "ray_fracbackend" / "__init__.py").write_text(f'__version__ = "{__version__}"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=told):
        release.check_tag(f"v{__version__}")


def test_nothing_else_is_uploaded(tmp_path):
    """A folder with other files than the two of this version is refused, before a build and after it."""
    with pytest.raises(SystemExit, match="it has nothing"):
        release.built(tmp_path)
    (tmp_path / "ray_fracbackend-0.0.9-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        release.build(tmp_path)
    with pytest.raises(SystemExit, match=r"it has ray_fracbackend-0\.0\.9-py3-none-any\.whl"):
        release.built(tmp_path)


def test_every_command_of_the_wheel_is_run():
    """The list of commands that are run with the wheel is that of the command line, with valid arguments."""
    (choices,) = (action.choices for action in parser()._actions if action.dest == "command")
    assert set(COMMANDS) == set(choices)
    for name, command in COMMANDS.items():
        parser().parse_args((name, *command.arguments))


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_dry_run(tmp_path):
    """Every step except the upload: the tag, one build, and every command of the built wheel in a separate environment."""
    for arguments in (("check-tag", f"v{__version__}"), ("build", tmp_path / "built"), ("test", tmp_path / "built")):
        done = step(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "built").iterdir())) == 2
