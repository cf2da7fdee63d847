"""A short version of the long run, and what it counts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
import ray

from ray_fracbackend._ray import v2_enabled
from tests.processes import run_processes
from tests.soak import cycles
from tests.soak.belongings import belongings

pytestmark = [
    pytest.mark.linux(reason="needs /proc, which tells what a process holds"),
    pytest.mark.timeout(900),
]


def counts(rank: int, num_processes: int, port: int) -> list[dict[str, int]]:
    """Return what is counted with one of each, and without them."""
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
    names = before.keys() - {"rss_bytes"}
    return [{name: found[name] - before[name] for name in names} for found in (now, belongings())]


def test_belongings_counts_what_a_start_could_leave_behind() -> None:
    """A thread, a listening socket and its descriptor, shared memory, a child process and a variable are each counted."""
    ((more, none),) = run_processes(counts, 1)
    assert min(more.values()) >= 1, more
    assert none == dict.fromkeys(more, 0)


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
