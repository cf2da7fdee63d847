"""A short version of the long run, and the detection of growth."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
import ray

from ray_fracbackend._ray import v2_enabled
from tests.soak import cycles
from tests.soak.belongings import Samples, belongings

pytestmark = [
    pytest.mark.linux(reason="needs /proc, which tells what a process holds"),
    pytest.mark.timeout(900),
]

_FLAT = {"descriptors": [40] * 10, "threads": [7] * 10}


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


@pytest.mark.parametrize(
    ("figures", "warm_up", "limit", "grew"),
    [
        # Equal counts, single outliers and memory below its limit.
        ({"ports": [1] * 5 + [3] + [1] * 4, "rss_bytes": [10**8 + 30_000 * (i % 2) for i in range(10)]}, 0, 2048, []),
        # One descriptor in a hundred starts.
        ({"descriptors": [40 + i // 5 for i in range(10)]}, 0, 2048, ["driver: descriptors grew from 40 to 41"]),
        # Samples before the end of the warm-up are ignored.
        ({"rss_bytes": [0] + [10**8 + 3000 * 20 * i for i in range(9)]}, 40, 2048, ["driver: rss_bytes grew from "]),
        ({"rss_bytes": [0] + [10**8 + 3000 * 20 * i for i in range(9)]}, 40, 4096, []),
    ],
)
def test_growth(figures: dict[str, list[int]], warm_up: int, limit: int, grew: list[str]) -> None:
    """It is reported with the names of process and count; only memory may grow, by a limit per start."""
    samples = Samples(list(range(20, 220, 20)), {"driver": {**_FLAT, **figures}}, threads=[["python"]] * 10)
    found = samples.judged(warm_up, limit)["grew"]
    assert len(found) == len(grew)
    assert all(text.startswith(start) for text, start in zip(found, grew, strict=True))


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
