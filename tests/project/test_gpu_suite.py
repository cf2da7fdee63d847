"""ci/gpu.sh without a GPU: a mistake in it would cost the time on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_dry_run(tmp_path):
    """--dry imports everything, collects all tests and runs every benchmark on CPUs."""
    folders = ["--bundle", tmp_path / "none", "--out", tmp_path / "out"]
    command = [_ROOT / "ci" / "gpu.sh", "all", "--dry", "--minutes", "28", *folders]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    ended = [row for row in rows if row.get("event") == "ended"]
    assert {row["status"] for row in ended} == {"passed"}
    assert all(row["counts"]["collected"] > 2 for row in ended if "--collect-only" in row["command"])
    measured = {row["backend"] for row in rows if row.get("script") == "gpu_all_reduce" and "median_ms" in row}
    assert measured >= {"copy", "gloo", "staged", "ipc", "ipc_one_pass", "ipc_4_mib"}
    (report,) = (tmp_path / "out").glob("gpu_dry_*.txt")
    lines = dict(line.split(": ", 1) for line in report.read_text().splitlines()[2:12])
    assert len(lines) == 10
    assert all(f"{backend} " in lines["all_reduce of 64 KiB, 2 ranks, ms"] for backend in measured)
    assert lines["backend by the rule"] in measured
