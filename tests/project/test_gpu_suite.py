"""ci/gpu.sh without a GPU: a mistake in it would cost the time on one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_STEPS = {
    "A": ["imports", "gpu_probe", "right", "gpu_all_reduce", "gpu_all_reduce_bf16", "gpu_all_gather", "gpu_ddp"],
    "B": ["imports", "tests_ipc", "tests_staged"],
    "C": ["imports", "tests_ray"],
    "D": ["imports", "gpu_handoff", "gpu_handoff_mps", "gpu_all_reduce_mps", "gpu_all_reduce_nccl"],
}
_STEPS["D"] += ["gpu_ddp_mps", "tests_nccl"]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_dry_run(tmp_path):
    """--dry imports everything, collects all tests, runs every benchmark on CPUs and writes all files of a call."""
    command = [_ROOT / "ci" / "gpu.sh", "all", "--dry", "--bundle", tmp_path / "none", "--out", tmp_path / "out"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    steps = {(row["call"], row["step"]): row for row in rows if row.get("event") == "ended"}
    assert list(steps) == [(call, step) for call, names in _STEPS.items() for step in names]
    assert {row["status"] for row in steps.values()} == {"passed"}
    assert all(
        row["counts"]["collected"] > 4 for (_, step), row in steps.items() if step.startswith(("tests", "right"))
    )
    names = {re.sub(r"_dry_[\d-]+", "", path.name) for path in (tmp_path / "out").iterdir()}
    reports = {f"gpu_{call}.{suffix}" for call in _STEPS for suffix in ("json", "txt")}
    assert names == {*reports, *(f"logs_{call}.tar" for call in _STEPS), "rows.jsonl"}
    measured = {row["backend"] for row in rows if row.get("script") == "gpu_all_reduce" and "median_ms" in row}
    assert measured >= {"copy", "gloo", "staged", "ipc", "ipc_split", "ipc_one_pass", "ipc_4_mib"}
