"""Examples that no other folder runs: one_gpu.py, and what users copy into a repository or a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.integrations.callback import CALLBACKS_ENV, SETTINGS_ENV

_ROOT = Path(__file__).parents[2]
_EXAMPLES = _ROOT / "examples"


def shell(line: str, folder: Path, **env: str) -> str:
    """Run a line in a folder, with the programs of this environment and this checkout; return what it printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(_ROOT), "HOME": str(folder), **env}
    command = ["bash", "-e", "-o", "pipefail", "-c", line]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.linux(reason="the commands are for a shell of Linux")
def test_one_gpu(tmp_path: Path) -> None:
    """The script of docs/recipes/one-gpu.md trains on any machine."""
    assert "epoch 4: loss" in shell(f"python {_EXAMPLES / 'one_gpu.py'}", tmp_path)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.linux(reason="the commands are for a shell of Linux")
def test_workflow_steps(tmp_path: Path) -> None:
    """Every `run:` step of examples/github_workflow.yml passes; only the installation is left out."""
    shutil.copy(_EXAMPLES / "stock_train.py", tmp_path / "train.py")
    job = yaml.safe_load((_EXAMPLES / "github_workflow.yml").read_text())["jobs"]["train"]
    steps = {step["name"]: step["run"] for step in job["steps"] if "run" in step}
    assert steps.pop("Install").startswith("python -m pip install wheels/ray_fracbackend-")
    printed = [shell(line, tmp_path, CI="true") for line in steps.values()]
    assert "epoch 4: loss" in printed[-1]


def test_manifest_of_kuberay() -> None:
    """The variables of examples/kuberay_rayjob.yaml are those of the callback, in every pod, with valid settings."""
    spec = yaml.safe_load((_EXAMPLES / "kuberay_rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for pod in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        (container,) = pod["template"]["spec"]["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert variables.pop(CALLBACKS_ENV) == "ray_fracbackend.integrations.callback.FracTorchCallback"
        Settings(**json.loads(variables.pop(SETTINGS_ENV)))
        assert variables == {}
