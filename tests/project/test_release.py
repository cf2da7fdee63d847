"""Requirements of a release: tag, version, changelog and metadata and the files that are built."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ray_fracbackend import __version__
from ray_fracbackend.cli.parser import parser

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "ci"))

import release  # noqa: E402
from commands import COMMANDS  # noqa: E402

_PROJECT = (_ROOT / "pyproject.toml").read_text()


def test_install_page_has_the_version():
    page = (_ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"ray_fracbackend-([\w.]+)-py3", page)) == {__version__}


def test_classifiers_match_the_runs():
    """The classifiers list the Python versions that passed in the matrix, and no system on which nothing ran."""
    rows = [json.loads(line) for line in (_ROOT / "ci" / "matrix_results.jsonl").read_text().splitlines()]
    passed = {row["python"] for row in rows if row["result"] == "passed"}
    assert set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', _PROJECT)) == passed
    assert re.findall(r'"Operating System :: (.+)"', _PROJECT) == ["POSIX :: Linux"]


@pytest.mark.parametrize(
    ("tag", "heading", "told"),
    [
        ("v0.2.0", "[0.2.0] - 2026-11-25", None),
        ("0.2.0", "[0.2.0] - 2026-11-25", "the tag must be v0.2.0"),
        ("v0.1.9", "[0.2.0] - 2026-11-25", "the tag must be v0.2.0"),
        ("v0.2.0rc1", "[0.2.0] - 2026-11-25", "the tag must be v0.2.0"),
        ("v0.2.0", "[Unreleased]", "it has 0"),
        ("v0.2.0", "[0.2.0]", "it has 0"),
        ("v0.2.0", "[0.2.0] - soon", "the date of .* is soon"),
        ("v0.2.0", "[0.2.0] - 2026-13-01", "the date of .* is 2026-13-01"),
    ],
)
def test_tag(tag, heading, told, tmp_path, monkeypatch):
    """The tag must be that of the version, and the changelog must have its dated section."""
    (tmp_path / "ray_fracbackend").mkdir()
    (tmp_path / "ray_fracbackend" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    if told is None:
        release.check_tag(tag)
    else:
        with pytest.raises(SystemExit, match=told):
            release.check_tag(tag)


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
    (choices,) = (action.choices for action in parser()._actions if action.dest == "command")
    assert set(COMMANDS) == set(choices)
    for name, command in COMMANDS.items():
        parser().parse_args((name, *command.arguments))


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_dry_run(tmp_path):
    """Every step except tag and upload: one build, and every command of the built wheel in a separate environment."""
    for step in ("build", "test"):
        command = [sys.executable, _ROOT / "ci" / "release.py", step, tmp_path / "built"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "built").iterdir())) == 2


def test_first_commands_of_readme():
    """The first command installs the package and runs the demo, the second installs and runs the tests."""
    commands = re.findall(r"^    (\S*python3? .+)$", (_ROOT / "README.md").read_text(), flags=re.MULTILINE)
    demo = "python3 -m venv .venv && .venv/bin/python -m pip install -c ci/constraints.txt '.[demo]' && .venv/bin/ray-fracbackend demo"
    assert commands[:2] == [demo, "python3 ci/test.py"]
