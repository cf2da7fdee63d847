"""The project's own checks, by the scripts that people and CI call."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["lint.py", "wheel.py"])
def test_script(script):
    """ruff, ruff format and mypy for three platforms are clean; the wheel installs, imports and has its command line."""
    done = subprocess.run(
        [sys.executable, _ROOT / "ci" / script], capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
