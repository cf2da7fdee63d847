"""The benchmark of the ipc backend: it runs, returns complete rows, and leaves nothing. Its speed is not tested."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from benchmarks.ipc import load, rank, ranks
from benchmarks.ipc.__main__ import why_not
from ray_fracbackend.ipc import host_memory_support
from tests.processes import processes_with, run_processes, wait_until, with_signals

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


def test_a_rank_that_fails_ends_the_others(monkeypatch):
    """Otherwise the others would wait for it for five minutes."""
    monkeypatch.setattr(ranks.sys, "executable", os.fspath(Path(__file__).with_name("rank_1_fails.sh")))
    with pytest.raises(RuntimeError, match="ended with exit code 3: no device here"):
        ranks.run_benchmark(3, operations=["all_reduce"], sizes=[4096])


def test_loops_keep_a_machine_busy():
    """They run while they are needed, do not count as other processes, and are ended afterwards, including killed ones."""
    with load.busy_loops(2) as pids:
        loops = [psutil.Process(pid) for pid in pids]
        assert wait_until(lambda: all(loop.cpu_times().user > 0.2 for loop in loops), 60)
        used = sum(sum(loop.cpu_times()[:2]) for loop in loops)
        without = load.busy_s(pids)
        assert round(load.busy_s() - without, 2) >= round(used, 2)
        loops[0].kill()
    assert not any(loop.is_running() for loop in loops)


def ask(index, num_ranks, port):
    """Return whether a group works: it does, it lacks the device on rank 1, it does."""
    store = TCPStore("127.0.0.1", port, is_master=index == 0)
    dist.init_process_group("ipc", store=store, rank=index, world_size=num_ranks)
    working, alone = dist.new_group(backend="gloo"), dist.new_group([0], backend="gloo")
    cpu, refused = torch.device("cpu"), torch.device("mps")
    cases = [(working, cpu), (working, refused) if index else (alone, cpu), (working, cpu)]
    answers = [rank._works_everywhere(group, device) for group, device in cases]
    dist.destroy_process_group()
    return answers


@full
def test_a_backend_that_one_rank_cannot_use_is_left_out_on_all():
    """Otherwise the ranks would measure different things and wait for each other."""
    assert run_processes(ask, 2) == [[True, False, True]] * 2


@pytest.mark.parametrize(
    ("num_ranks", "size", "device", "out", "said"),
    [
        ([2, 4], 8, "cpu", "new", "--sizes 8"),
        ([2], 2**40, "cpu", "new", r"--sizes \d+ with 2 ranks"),
        ([2], 4096, "cpu", "/proc/x", "--out /proc/x"),
        ([2], 4096, "cuda", "new", "--device cuda"),
    ],
)
def test_checks_before_a_measurement(num_ranks, size, device, out, said, tmp_path, monkeypatch):
    """A wrong path does not lose minutes of work, and a wrong size does not exhaust the machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.match(said, why_not(num_ranks, [size], device, tmp_path / out))
    assert why_not([2], [4096], "cpu", tmp_path / "new") is None
