"""Workflows in .github: pinned actions, every test of CUDA tensors, and one build and one upload for a release."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "ci"))

import cuda_steps  # noqa: E402

_TEXTS = {path.name: path.read_text() for path in sorted((_ROOT / ".github" / "workflows").glob("*.yml"))}
# Read everything as text: YAML would read "on" as True.
_WORKFLOWS: dict[str, dict[str, Any]] = {name: yaml.load(text, Loader=yaml.BaseLoader) for name, text in _TEXTS.items()}
_JOBS = {(name, job): content for name, workflow in _WORKFLOWS.items() for job, content in workflow["jobs"].items()}
_RELEASE = _WORKFLOWS["release.yml"]["jobs"]


def commands_of(job: dict[str, Any]) -> str:
    """Return all shell lines of a job; a job that calls another workflow has none."""
    return "\n".join(step["run"] for step in job.get("steps", []) if "run" in step)


@pytest.mark.parametrize("name", _WORKFLOWS)
def test_actions_are_pinned(name: str) -> None:
    """Every action has a full commit and its version in a comment."""
    used = re.findall(r"^\s*(?:- )?uses: (.+)$", _TEXTS[name], flags=re.MULTILINE)
    assert used
    bad = [each for each in used if not re.fullmatch(r"(\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\S+\.yml)", each)]
    assert bad == []


def test_all_tests_of_cuda_tensors_are_in_a_step() -> None:
    """A file that no step of ci/cuda.py names would run nowhere."""
    named = {word for step in cuda_steps.STEPS.values() for word in step.command}
    paths = [*_ROOT.glob("tests/cuda/test_*.py"), *_ROOT.glob("tests/gpu/test_*.py")]
    assert {path.relative_to(_ROOT).as_posix() for path in paths} <= named


def test_only_the_upload_can_publish() -> None:
    """Only one job has a token for the package index. It waits for its environment and all other jobs, and runs none of our code."""
    publishing = [name for name, job in _JOBS.items() if "id-token" in str(job.get("permissions"))]
    assert publishing == [("release.yml", "publish")]
    assert all("id-token" not in str(workflow.get("permissions")) for workflow in _WORKFLOWS.values())
    publish = _RELEASE["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    assert set(publish["needs"]) == set(_RELEASE) - {"publish"}
    used = [step.get("uses", "sums").partition("@")[0] for step in publish["steps"]]
    assert used == ["actions/download-artifact", "sums", "pypa/gh-action-pypi-publish"]


@pytest.mark.parametrize(
    ("change", "passes"),
    [("true", True), ("echo >> a.whl", False), ("mv a.whl b.whl", False), ("touch b.whl", False), ("rm a.whl", False)],
)
def test_only_what_was_built_is_uploaded(tmp_path: Path, change: str, passes: bool) -> None:
    """The commands of build and upload, with an artifact that another job has replaced in between."""
    (sums,) = (step["run"] for step in _RELEASE["build"]["steps"] if step.get("id") == "sums")
    script = f"""
mkdir -p build/release && cd build/release && echo wheel > a.whl && echo archive > a.tar.gz && cd ../..
({sums})
export SUMS="$(grep '  ' "$GITHUB_OUTPUT")"
mv build/release dist
(cd dist && {change})
{commands_of(_RELEASE["publish"])}
"""
    env = {**os.environ, "GITHUB_OUTPUT": str(tmp_path / "output")}
    assert (subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=env, check=False).returncode == 0) == passes
    assert re.search(
        r"sha256sum --check[^\0]+release\.py test", commands_of(_RELEASE["test"])
    )  # and so is what was tested
