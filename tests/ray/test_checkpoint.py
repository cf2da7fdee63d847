"""Checkpoints of one file name from every rank, with copying that shares files as Windows does, on both Train engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "checkpoint_script.py"


@pytest.mark.parametrize("engine", ["1", "0"], ids=["v2", "v1"])
@pytest.mark.slow
def test_report_rank0_avoids_the_sharing_violation(engine: str, tmp_path: Path) -> None:
    """Every rank reporting model.pt ends with WinError 32 under ray.train.report and well under report_rank0."""
    root = str(SCRIPT.parent.parent.parent)
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": engine, "PYTHONPATH": root, "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith(("stock:", "files:"))]
    assert len(told) == 2
    assert "WinError 32" in told[0]
    assert told[1] == "files: ['model.pt'] 1.0"
