"""The project's own checks, by the scripts that people and CI call."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_lint():
    """ruff, ruff format, mypy for three platforms and the checks of the workflows pass."""
    done = subprocess.run(
        [sys.executable, _ROOT / "ci" / "lint.py"], capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
