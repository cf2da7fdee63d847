"""The figures and numbers of the docs are those of the committed results."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.parametrize("script", ["plots.py", "tables.py"])
def test_docs_are_up_to_date(script):
    """If not, run the script without --check."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    command = [sys.executable, Path(__file__).parents[2] / "benchmarks" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
