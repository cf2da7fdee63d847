"""The bench command: real measurements of small sizes, as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from ray_fracbackend.cli import bench, bench_ranks, main
from ray_fracbackend.decide.nccl import multi_rank_env
from ray_fracbackend.ipc import host_memory_support
from tests.processes import wait_until, with_signals

pytestmark = pytest.mark.skipif(host_memory_support() is not None, reason=f"no ipc here: {host_memory_support()}")


def run(*arguments):
    command = [sys.executable, "-m", "ray_fracbackend", "bench", "--ranks", "2", "--sizes", "4096", "--rounds", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.full
def test_json_and_plot(tmp_path):
    """--json is one document with both sides of every case, and --plot draws it."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra bench)")
    done = run("--json", "--plot", str(tmp_path / "bench.png"))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {"ipc", "gloo"} <= {row["backend"] for row in rows}
    assert {row["operation"] for row in rows} == {"all_reduce", "ddp_step"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_operation(capsys):
    """A wrong operation is exit code 2 with the names that there are."""
    assert main(["bench", "--operations", "all_reduze"]) == 2
    assert "must be one of all_reduce" in capsys.readouterr().err


def own_ranks(run_id):
    """Processes of the ranks that the benchmark with this variable has started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("BENCH_TEST") == run_id and "ray_fracbackend.cli.bench_rank" in process.cmdline():
                found.append(process)
    return found


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGINT, 130, "ray-fracbackend: interrupted\n", marks=pytest.mark.full),
        (signal.SIGTERM, 143, "ray-fracbackend: ended by SIGTERM\n"),
        (9, -9, ""),  # SIGKILL, a name that Windows lacks
    ],
)
def test_no_rank_is_left(number, code, said):
    """However the command ends, as by a cancelled job of CI, its ranks do too."""
    run_id = uuid.uuid4().hex
    arguments = ["bench", "--ranks", "2", "--rounds", "1000", "--sizes", "4096"]
    command = with_signals(sys.executable, "-m", "ray_fracbackend", *arguments)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BENCH_TEST": run_id},
    )
    assert wait_until(lambda: len(own_ranks(run_id)) == 2, 120)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (code, "", said)
    assert wait_until(lambda: not own_ranks(run_id), 60)


def test_a_rank_that_fails_ends_the_others(monkeypatch):
    """They would wait for it for five minutes."""
    monkeypatch.setattr(bench_ranks.sys, "executable", os.fspath(Path(__file__).with_name("bench_rank_1_fails.sh")))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="ended with exit code 3: no device here"):
        bench_ranks.run_benchmark(3, operations=["all_reduce"], sizes=[4096])
    assert time.monotonic() - started < 100  # not the 300 s that the others would sleep


def test_a_signal_while_the_ranks_start_ends_them(monkeypatch):
    """Once a thread reads from a rank, the pool of the threads waits for that rank, which nobody would have ended."""

    class Interrupted(ThreadPoolExecutor):
        def submit(self, function, process, *arguments):
            if process.args[-1] == self.last:
                raise KeyboardInterrupt
            self.last = process.args[-1]
            return super().submit(function, process, *arguments)

        last = None

    monkeypatch.setattr(bench_ranks.sys, "executable", os.fspath(Path(__file__).with_name("bench_rank_1_fails.sh")))
    monkeypatch.setattr(bench_ranks, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_ranks.run_benchmark(2, operations=["all_reduce"], sizes=[4096])


def result(**changes):
    row = {"operation": "all_reduce", "num_ranks": 2}
    rows = [
        {**row, "num_bytes": size, "backend": backend, "median_ms": ms}
        for size in (8, 4096)
        for backend, ms in (("ipc", 0.5), ("gloo", 1.0), ("copy", 0.1))
    ]
    return {"rows": rows, "cpu_share_of_other_processes": 0.02, **changes}


def test_table():
    """Units, sizes below 1 KiB, what the columns mean, and no caveat on a quiet machine."""
    text = bench.table(result())
    header, small, *_ = text.splitlines()
    assert header.split()[2:] == ["KiB", "ipc,", "ms", "gloo,", "ms", "copy,", "ms", "gloo/ipc"]
    assert small.split() == ["all_reduce", "2", "0.0078125", "0.500", "1.000", "0.100", "2.0"]
    assert "copy: a plain copy" in text
    assert "gloo/ipc: how many times as long Gloo takes" in text
    assert "warning" not in text


def test_table_of_a_busy_machine():
    """The numbers carry how much of the machine others took."""
    assert "warning: other processes used 89% of this machine" in bench.table(
        result(cpu_share_of_other_processes=0.888)
    )


@pytest.mark.parametrize(
    ("ranks", "sizes", "picture", "said"),
    [
        ([2, 4], [8], None, "--sizes 8: must be at least 16 bytes, a float32 for each of 4 ranks"),
        ([2], [2**40], None, r"--sizes \d+ with 2 ranks: needs 16384.0 GiB of memory, and .* free; ask for smaller"),
        ([2], [4096], "/nonexistent/x.png", "--plot /nonexistent/x.png: /nonexistent is not a folder"),
        ([2], [4096], "x.foo", "--plot x.foo: must end in one of .*png"),
        ([2], [4096], "folder.png", "--plot folder.png: folder.png cannot be written"),
    ],
)
def test_what_is_checked_before_a_measurement(ranks, sizes, picture, said, tmp_path, monkeypatch):
    """Minutes of work are not lost to a wrong path, nor the machine to a wrong size."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (extra bench)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=said):
        bench.check(ranks, sizes, "cpu", picture and Path(picture))
    bench.check([2], [4096], "cpu", tmp_path / "new.png")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where torch sees no CUDA device")
def test_no_device_to_measure_on(capsys):
    """Without CUDA, --device cuda says where to look."""
    assert main(["bench", "--ranks", "2", "--device", "cuda"]) == 1
    assert "no CUDA device here; ray-fracbackend doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "version", "expected"),
    [
        (1, (2, 21, 5), {}),
        (2, (2, 29, 7), None),
        (2, None, None),
        (2, (2, 30, 7), multi_rank_env(2)),
        (8, (2, 30, 0), multi_rank_env(8)),
    ],
)
def test_nccl_is_measured_where_it_takes_the_ranks(monkeypatch, ranks, version, expected):
    """A version that lets ranks share a device, and its flags for so many."""
    monkeypatch.setattr(bench, "loaded_nccl_version", lambda: version)
    assert bench._nccl_env(ranks) == expected
