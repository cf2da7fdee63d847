"""The package by runtime_env, as docs/install.md says for nodes that do not have it: Ray copies it to the workers, which import the copy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ray_fracbackend
from tests.processes import python_path

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

_FOLDER = Path(ray_fracbackend.__file__).parent


@pytest.mark.parametrize("py_module", ["module", str(_FOLDER)], ids=["the module", "its folder"])
def test_py_modules(tmp_path, py_module):
    """The workers train with Ray's copy, although the driver's environment also has the package."""
    script = Path(__file__).with_name("install_script.py")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, script, tmp_path, py_module],
        cwd=tmp_path,  # a driver's folder is on the path of its workers
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.glob("rank*.json")]
    assert [start["backend"] for start in found] == ["gloo", "gloo"]
    for start in found:
        assert "py_modules_files" in Path(start["package"]).parts
