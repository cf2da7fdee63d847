"""Checkpoints of one file name from every rank, with copying that shares files as Windows does; on Windows itself.

With the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import python_path
from tests.ray.conftest import run_example

SCRIPT = Path(__file__).parent / "checkpoint_script.py"


_STORED = "files: ['model.pt'] 1.0"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param("in_turn", _STORED, marks=pytest.mark.full(but="V2")),
        pytest.param("rank0", _STORED, marks=pytest.mark.full),
        pytest.param("stock", "WinError 32", marks=pytest.mark.full),
    ],
)
def test_ranks_that_store_one_file_name(how: str, told: str, tmp_path: Path) -> None:
    """Every rank reporting model.pt ends with WinError 32 under stock Ray, and well where the ranks take turns or rank 0 reports."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), how],
        capture_output=True,
        text=True,
        env=environment,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert told in done.stdout


@pytest.mark.full
def test_the_windows_laptop_example(tmp_path: Path) -> None:
    """Half a GPU for each of two workers, and a checkpoint of one name from both in every epoch: all can be loaded."""
    done = run_example("windows_laptop.py", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loaded the checkpoint of epoch 2: 100% of the digits are right" in done.stdout
    states = [torch.load(path) for path in sorted(tmp_path.rglob("checkpoint.pt"))]
    assert [state["epoch"] for state in states] == [0, 1, 2]
    assert list(tmp_path.rglob("start_report.json"))
