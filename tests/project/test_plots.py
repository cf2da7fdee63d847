"""The figures and numbers of the docs are those of the committed results."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.parametrize(
    "command", [("plots.py", "--check"), ("tables.py", "--check"), ("plots.py", "--out", "{folder}")], ids=" ".join
)
def test_docs_are_up_to_date(command, tmp_path):
    """If not, run the script without --check. Each figure can be drawn, without a text that is cut."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    script, *options = (word.format(folder=tmp_path) for word in command)
    command = [sys.executable, Path(__file__).parents[2] / "benchmarks" / script, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
