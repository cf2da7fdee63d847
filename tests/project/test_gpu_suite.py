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
    command = [_ROOT / "ci" / "gpu.sh", "all", "--dry", "--bundle", tmp_path / "none", "--out", tmp_path / "out"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    ended = [row for row in rows if row.get("event") == "ended"]
    assert {(row["call"], row["status"]) for row in ended} == {(call, "passed") for call in "ABCD"}
    assert all(row["counts"]["collected"] > 4 for row in ended if row["step"].startswith(("tests", "right")))
    measured = {row["backend"] for row in rows if row.get("script") == "gpu_all_reduce" and "median_ms" in row}
    assert measured >= {"copy", "gloo", "staged", "ipc", "ipc_one_pass", "ipc_4_mib"}
