"""The benchmark of the ipc backend: it runs, returns complete rows, and leaves nothing. Its speed is not tested."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_fracbackend.ipc import host_memory_support
from tests.processes import processes_with, wait_until, with_signals

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(host_memory_support() is not None, reason=f"no ipc here: {host_memory_support()}")
full = pytest.mark.full


def command(*arguments):
    return [sys.executable, "-m", "benchmarks.ipc", "--ranks", "2", "--sizes", "4096", *map(str, arguments)]


@full
def test_the_results_and_their_plots(tmp_path, monkeypatch):
    """Tables, a dated JSON of each kind with positive, ordered quartiles for each operation and backend and the machine, and plots."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "deepspeed.py").write_text("raise ImportError('not here')")
    step, cold = ["gloo", "ipc", "none"], ["gloo", "ipc", "gloo_async", "ipc_async", "none"]
    kinds = {
        "ipc": {"all_reduce": ["gloo", "ipc", "copy"]},
        "ipc_training": {"ddp_step": [*step, "copies"], "fsdp_step": step, "cold_all_reduce": cold},
    }
    operations = [name for of in kinds.values() for name in of]
    arguments = ["--rounds", 1, "--starts", 2, "--tries", 1, "--operations", *operations, "--out", tmp_path]
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "gloo/ipc" in done.stdout
    assert "deepspeed: not measured: ImportError: not here" in done.stdout
    for kind, backends in kinds.items():
        (path,) = tmp_path.glob(f"{kind}_2*.json")
        result = json.loads(path.read_text())
        measured = [(row["operation"], row["backend"]) for row in result["rows"] if row["backend"] != "open_mpi"]
        assert sorted(measured) == sorted((name, backend) for name, of in backends.items() for backend in of)
        for row in result["rows"]:
            assert 0 < row["p25_ms"] <= row["median_ms"] <= row["p75_ms"]
            assert (row["num_bytes"], row["num_ranks"], row["busy"]) == (4096, 2, 0)
            assert len(row["start_medians_ms"]) == 2
        assert result["environment"]["num_cpus"] == os.cpu_count()
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_is_left(number, monkeypatch, tmp_path):
    """The ranks end with the benchmark, however it ends, for example in a cancelled job."""
    monkeypatch.setenv("IPC_BENCH_TEST", str(tmp_path))
    process = subprocess.Popen(with_signals(*command("--rounds", 1000, "--out", tmp_path)), cwd=ROOT)

    def of_ranks():
        return [
            each for each in processes_with("IPC_BENCH_TEST", str(tmp_path)) if "benchmarks.ipc.rank" in each.cmdline()
        ]

    assert wait_until(lambda: len(of_ranks()) == 2, 120)
    process.send_signal(number)
    assert process.wait(60) == -number
    assert wait_until(lambda: not of_ranks(), 60)
    assert list(tmp_path.iterdir()) == []
