"""ci/recipes.py and the pages of docs/recipes that need no second node; those that do are in tests/net/test_recipe.py."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "ci"))

import recipes  # noqa: E402

from ray_fracbackend.decide.settings import Settings  # noqa: E402
from ray_fracbackend.integrations.callback import CALLBACKS_ENV, SETTINGS_ENV  # noqa: E402

_NAMES = sorted(path.stem for path in recipes.PAGES.glob("*.md"))
_WORKFLOW = _ROOT / "examples" / "github_workflow.yml"

needs_linux = pytest.mark.linux(reason="the commands of the pages are for a shell of Linux")


@pytest.mark.parametrize("name", _NAMES)
def test_files_of_a_page(name: str) -> None:
    """A page has the files and differences as they are: python ci/recipes.py --write puts them there."""
    page = recipes.read(name)
    assert page.stale == []
    assert page.commands


@pytest.mark.full
@pytest.mark.timeout(600)
@needs_linux
@pytest.mark.parametrize("name", [name for name in _NAMES if "two-nodes" not in recipes.read(name).options])
def test_commands_of_a_page(name: str) -> None:
    """Each command of the page ends as the page says, with the output that the page has."""
    found = recipes.problems(name)
    assert not found, "\n".join(found)


@pytest.fixture
def small_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with a file, a command that prints an address and a time, and one that fails as it should."""
    monkeypatch.setattr(recipes, "PAGES", tmp_path)
    page = tmp_path / "small.md"
    page.write_text(
        "<!-- recipe: data.txt=pyproject.toml -->\n<!-- file: LICENSE -->\n\n```text\nold\n```\n"
        "<!-- run: keep=^[abn] -->\n\n    echo 'at 10.0.0.7:4711 in 12.5 ms'; echo 'at 10.0.0.8:4712 in 1 s'\n"
        '    grep ^name data.txt; echo left out\n\nIt prints:\n\n```text\nat 10.0.0.3:9 in 3 ms\nname = "ray-fracbackend"\n```\n'
        "<!-- run: exit=3 -->\n\n    exit 3\n"
    )
    return page


@needs_linux
def test_an_output_that_is_right(small_page: Path) -> None:
    """Addresses, ports and times may differ; the file is compared as it is, and --write puts it and the output into the page."""
    assert recipes.problems("small") == ["old\n"]
    assert recipes.write("small") == []
    assert recipes.problems("small") == []
    text = small_page.read_text()
    assert "Apache License" in text
    assert 'at 10.0.0.7:4711 in 12.5 ms\nat 10.0.0.8:4712 in 1 s\nname = "ray-fracbackend"\n```\n' in text
    assert "left out\n`" not in text


@needs_linux
def test_an_output_that_is_wrong(small_page: Path) -> None:
    """A line that the page does not have and another exit code are named, with the command."""
    text = small_page.read_text().replace("ray-fracbackend", "other").replace("exit=3", "exit=4")
    small_page.write_text(text)
    _, differs, ended = recipes.problems("small")
    assert '-name = "other"\n+name = "ray-fracbackend"' in differs
    assert ended.startswith("exit 3\nexit code 3, not 4:")


@needs_linux
def test_no_process_is_left(small_page: Path) -> None:
    """What a command leaves in the background is ended with the page, and a command is ended at its limit."""
    small_page.write_text(
        "<!-- run: -->\n\n    sleep 600 & echo $!\n\n```text\n```\n<!-- run: limit=1 -->\n\n    sleep 600\n"
    )
    left, ended = recipes.run_page(recipes.read("small"))
    assert "no end within its limit" in ended.ended
    pid = int(left.text)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_manifest_of_kuberay() -> None:
    """The variables of examples/kuberay_rayjob.yaml are those of the callback, in every pod, and name a class and settings that exist."""
    spec = yaml.safe_load((_ROOT / "examples" / "kuberay_rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for pod in pods:
        (container,) = pod["template"]["spec"]["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert set(variables) == {CALLBACKS_ENV, SETTINGS_ENV}
        module, _, name = variables[CALLBACKS_ENV].rpartition(".")
        assert module == "ray_fracbackend.integrations.callback"
        Settings(**json.loads(variables[SETTINGS_ENV]))
        if _has_callbacks():
            assert hasattr(importlib.import_module(module), name)


def _has_callbacks() -> bool:
    """Whether this Ray has the V2 engine, of which the callback's class is."""
    from ray_fracbackend._ray import v2_enabled

    return v2_enabled()


def test_workflow_is_linted() -> None:
    """The workflow for users is as valid as those of this project, and its actions are pinned to the same commits."""
    pytest.importorskip("jactionlint", reason="the extra test is not installed")
    command = [sys.executable, "-m", "jactionlint", "--strict-exit", "--shellcheck=", "--pyflakes=", str(_WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=_ROOT)
    assert done.returncode == 0, done.stdout
    ours = (_ROOT / ".github" / "workflows" / "ci.yml").read_text()
    used = [line.partition("uses: ")[2] for line in _WORKFLOW.read_text().splitlines() if "uses: " in line]
    assert len(used) == 2
    assert all(each in ours for each in used)


@pytest.mark.full
@pytest.mark.timeout(600)
@needs_linux
def test_workflow_steps(tmp_path: Path) -> None:
    """Every `run:` step of examples/github_workflow.yml passes, with a wheel of this version; only downloads are left out."""
    python = recipes.environment_over(tmp_path / "venv", site.getsitepackages())
    repository = tmp_path / "repository"
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        _ROOT,
        "--no-deps",
        "--no-build-isolation",
        "-w",
        repository / "wheels",
    ]
    subprocess.run(wheel, check=True, capture_output=True, timeout=120)
    shutil.copy(_ROOT / "examples" / "stock_train.py", repository / "train.py")
    job = yaml.safe_load(_WORKFLOW.read_text())["jobs"]["train"]
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONPATH" and not name.startswith("RAY_TRAIN")
        },
        **job["env"],
        "CI": "true",
        "HOME": str(tmp_path),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        # Ray and torch are there: what a runner downloads is not downloaded here.
        "PIP_NO_INDEX": "1",
    }
    steps = [step for step in job["steps"] if "run" in step]
    assert [step["name"] for step in steps] == ["Install", "Check the machine", "Train"]
    for step in steps:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60 * step.get("timeout-minutes", job["timeout-minutes"]),
            check=False,
        )
        assert done.returncode == 0, f"{step['name']}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "epoch 4: loss" in done.stdout + done.stderr
    packages = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    assert (packages / "ray_fracbackend").is_dir(), "the wheel was installed"
