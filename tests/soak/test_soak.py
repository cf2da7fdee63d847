"""Short versions of the long runs: each program does its work and detects what it should detect."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist
from net_nodes import why_not

from ray_fracbackend import VerificationError
from ray_fracbackend._ray import v2_enabled
from tests.soak import cycles, starts, trials
from tests.soak.belongings import Samples, belongings

pytestmark = [
    pytest.mark.linux(reason="needs /proc, which tells what a process holds"),
    pytest.mark.timeout(900),
]

_ROOT = Path(__file__).parents[2]
_FLAT = {"descriptors": [40] * 10, "threads": [7] * 10}


def sampled(**figures: list[int]) -> Samples:
    return Samples(list(range(20, 220, 20)), {"driver": {**_FLAT, **figures}}, threads=[["python"]] * 10)


def test_belongings_counts_what_a_start_could_leave_behind() -> None:
    """A thread, a listening socket and its descriptor, shared memory, a child process and a variable are each counted."""
    before = belongings()
    memory = os.memfd_create("ray_fracbackend_ipc")
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.environ["RFB_LEFT"] = "1"
    try:
        with socket.create_server(("127.0.0.1", 0)):
            now = belongings()
    finally:
        del os.environ["RFB_LEFT"]
        os.close(memory)
        over.set()
        thread.join()
        child.kill()
        child.communicate()
    more = {name: now[name] - before[name] for name in before if name != "rss_bytes"}
    assert min(more.values()) >= 1, more
    after = belongings()
    assert {name: after[name] - before[name] for name in more} == dict.fromkeys(more, 0)


class TestGrowth:
    """Detection of growth."""

    def test_flat_figures_and_noise_pass(self) -> None:
        """Equal counts, single outliers and memory below its limit do not count as growth."""
        found = sampled(ports=[1] * 5 + [3] + [1] * 4, rss_bytes=[10**8 + 30_000 * (i % 2) for i in range(10)])
        assert found.judged(0, rss_bytes_per_start=2048)["grew"] == []

    def test_one_descriptor_in_a_hundred_starts_is_found(self) -> None:
        """Growth is reported with the names of process and count."""
        (text,) = sampled(descriptors=[40 + i // 5 for i in range(10)]).judged(0, 2048)["grew"]
        assert text.startswith("driver: descriptors grew from 40 to 41")

    def test_memory_is_found_above_its_bound(self) -> None:
        """Memory may grow by a limit per start; samples before the end of the warm-up are ignored."""
        found = sampled(rss_bytes=[0] + [10**8 + 3000 * 20 * i for i in range(9)])
        assert len(found.judged(40, 2048)["grew"]) == 1
        assert found.judged(40, 4096)["grew"] == []


class TestRuns:
    """Runs generated from seeds."""

    def test_a_seed_makes_one_run(self) -> None:
        """The same seed generates the same run; many seeds generate every kind of fault in every phase."""
        runs = [starts.StartRun.random(random.Random(seed)) for seed in range(500)]
        assert runs == [starts.StartRun.random(random.Random(seed)) for seed in range(500)]
        made = {(run.strike.kind, run.strike.phase, run.backend) for run in runs}
        assert len(made) == len(starts.KINDS) * len(starts.PHASES) * 2
        assert {len(run.nodes) for run in runs} == {2, 3, 4, 5, 6}

    def test_errors_without_a_name_are_problems(self) -> None:
        """A start may raise only this package's errors, training also those of c10d and Gloo, and a stop none."""
        ours, c10d, gloo = (
            VerificationError("no"),
            dist.DistBackendError("no"),
            RuntimeError("Connection closed by peer"),
        )
        named = {phase: [starts.is_named(phase, e) for e in (ours, c10d, gloo)] for phase in starts.PHASES}
        assert named == {"start": [True, False, False], "train": [True, True, True], "stop": [False, False, False]}
        assert not starts.is_named("train", AssertionError("all_reduce is wrong in step 3"))


def soak(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.soak", *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.full
@pytest.mark.net
def test_runs_of_starts() -> None:
    """Starts in namespaces succeed or end in an expected error and leave nothing, as checked by the program."""
    if reason := why_not():
        pytest.skip(reason)
    runs = soak("--kind", "starts", "--runs", "3", "--seed", "5")
    assert [run["problems"] for run in runs] == [[], [], []]


@pytest.mark.full
@pytest.mark.net
def test_a_rank_that_a_stopped_one_keeps_waiting() -> None:
    """Rank 0, which has the store, is stopped when the start begins: rank 1 raises an error in time, and all start again."""
    if reason := why_not():
        pytest.skip(reason)
    (run,) = soak("--kind", "starts", "--only", "563925448")
    assert run["problems"] == []
    assert run["answers"][0]["start"][0] == "struck"
    assert "Rank 0 hangs" in run["answers"][0]["start"][1]
    assert set(run["answers"][1]["start"]) == {"good"}


@pytest.mark.full
def test_a_fit_with_a_killed_worker() -> None:
    """A worker is killed during training; Ray restarts the workers and the fit succeeds."""
    (run,) = soak("--kind", "fits", "--only", "22")
    assert run["killed"]
    assert run["finished"]


@pytest.mark.full
def test_cycles() -> None:
    """In a few cycles every count is sampled, and counts without a warm-up do not grow."""
    ray.shutdown()  # of earlier tests in this process
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    try:
        cycled = (cycles.with_v2 if v2_enabled() else cycles.with_v1)((6, 2, 3))
    finally:
        ray.shutdown()
    assert cycled.at == [2, 4, 6]
    assert set(cycled.figures) == {"driver", "ray", "worker 0", "worker 1"}
    for process in ("worker 0", "worker 1"):
        for name in ("shared_memory", "ports", "variables"):
            assert len(set(cycled.figures[process][name][1:])) == 1, (process, name)
    assert len(set(cycled.figures["ray"]["actors"])) == 1


@pytest.mark.full
def test_trials(tmp_path: Path) -> None:
    """Two trials on each side succeed, driver and Ray are sampled, and ours is compared with stock."""
    command = [sys.executable, "-m", "tests.soak.trials", "--tuners", "1", "--trials", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (json.loads(path.read_text()) for path in tmp_path.iterdir())
    for side in ("stock", "ours"):
        assert result[side]["errors"] == []
        assert set(result[side]["trends"]) == {"driver", "ray"}
    grown = max(0, round(result["stock"]["trends"]["driver"]["rss_bytes"]["slope"]))
    assert result["ours"]["limit_rss_bytes_per_start"] == trials.RSS_BYTES_PER_TRIAL + grown
