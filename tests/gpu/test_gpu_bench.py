"""The benchmark of ipc on a GPU: real measurements of one small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ipc.measure import nccl_env


def test_every_backend_that_takes_the_ranks_is_measured(tmp_path):
    """ipc, Gloo and a copy on the device; NCCL where its version and the devices allow it: in the file and in one table."""
    for package in ("tqdm", "matplotlib"):
        pytest.importorskip(package, reason=f"the benchmark needs {package}")
    command = [sys.executable, "-m", "benchmarks.ipc", "--device", "cuda", "--ranks", "2", "--sizes", "4096"]
    command += ["--rounds", "1", "--starts", "1", "--tries", "1", "--operations", "all_reduce", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("ipc_*.json")
    result = json.loads(path.read_text())
    measured = {"ipc", "gloo", "copy"} | ({"nccl"} if nccl_env(2) is not None else set())
    assert {row["backend"] for row in result["rows"]} == measured
    assert result["environment"]["gpus"]
    head, row, *_ = done.stdout.splitlines()
    assert all(f"{backend}, ms" in head for backend in measured)
    assert row.split()[:4] == ["all_reduce", "2", "0", "4"]
    assert "-" not in row.split()
