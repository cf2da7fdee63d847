"""Checkpoints of one file name from every rank, with copying that shares files as Windows does.

With the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "checkpoint_script.py"


@pytest.mark.full
@pytest.mark.parametrize(("how", "told"), [("rank0", "files: ['model.pt'] 1.0"), ("stock", "WinError 32")])
def test_report_rank0_avoids_the_sharing_violation(how: str, told: str, tmp_path: Path) -> None:
    """Every rank reporting model.pt ends with WinError 32 under ray.train.report and well under report_rank0."""
    root = str(SCRIPT.parent.parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "RAY_AUTH_MODE": "disabled"}
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
