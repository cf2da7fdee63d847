"""Failures of a group: random schedules, deaths at bad moments, abort and shutdown, errors.

test_ipc_faults.py tests single faults at every phase.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from ipc_calls import CALLS, SMALL_CHUNKS, bare_group, error_of, filled, options, strike
from ipc_harness import Job, on_ranks, open_local_store, run_ranks, values
from ipc_memories import check_random

from ray_fracbackend.ipc import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupPoisonedError,
    PeerLostError,
)

HOST = "RAY_FRACBACKEND_IPC_HOST"


@on_ranks(2)
def test_splits_that_disagree_are_named(job: Job) -> None:
    """Both ranks of an all_to_all raise an error if one expects other sizes than the peer sends."""
    pg = bare_group(job, "splits", job.rank, job.size, 30.0)
    sizes = [2, 2] if job.rank == 0 else [3, 4]
    error_type, text, _ = error_of(
        lambda: pg.all_to_all_single(torch.empty(sum(sizes)), filled(5), sizes, [2, 3], options("AllToAll"))
    )
    assert error_type in ("CollectiveMismatchError", "GroupPoisonedError")
    assert "rank 1 sends 12 bytes to rank 1, which expects 16" in text


@on_ranks(3, limit_s=60, needed=2)
def test_a_death_is_noticed_while_another_rank_is_waited_for(job: Job) -> None:
    """Rank 1, the first for which rank 0 waits, is busy until rank 0 has raised; rank 2 dies meanwhile."""
    pg = bare_group(job, "busy", job.rank, job.size, 30.0)
    pg.barrier(options("Barrier"))
    store = job.store()
    if job.rank == 1:
        store.wait(["rank 0 has raised"])
    elif job.rank == 2:
        strike("kill")
    error_type, text, _ = error_of(lambda: pg.barrier(options("Barrier")))
    store.set("rank 0 has raised", "")
    assert error_type == ("PeerLostError" if job.rank == 0 else "GroupPoisonedError")
    assert "rank 2" in text


def killed_between_hosts(job: Job, victim: int, name: str) -> tuple[str, str, float]:
    """A rank dies in the second of a few collectives between hosts."""
    torch.set_num_threads(1)
    pg = bare_group(job, "hosts", job.rank, job.size, 60.0)
    pg.barrier(options("Barrier"))
    if job.rank == victim:
        strike("kill")
    return error_of(lambda: (CALLS[name](pg), CALLS[name](pg), pg.barrier(options("Barrier"))))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_death_on_one_host_is_noticed_on_the_other(victim: int, name: str) -> None:
    """Leader or not, all survivors on both hosts raise an error, and none because of a timeout."""
    env = lambda rank: {**SMALL_CHUNKS, HOST: "aabb"[rank]}  # noqa: E731
    outcomes = run_ranks(killed_between_hosts, 4, victim, name, limit_s=50, env=env)
    for error_type, text, _ in values(outcomes[:victim] + outcomes[victim + 1 :]):
        assert error_type not in ("", "CollectiveTimeoutError"), text


@pytest.mark.parametrize("fault", ["stop", "absent"])
@on_ranks(3, limit_s=50, needed=2, env=lambda rank, fault: {**SMALL_CHUNKS, HOST: "aab"[rank]})
def test_a_time_limit_of_a_call_holds_between_hosts(job: Job, fault: str) -> None:
    """The other host does not answer: leader and member raise after the call's limit, and rank 1 does not blame rank 0, which waits too."""
    pg = bare_group(job, "limit", job.rank, job.size, 60.0)
    pg.barrier(options("Barrier"))
    if job.rank == 2:
        strike("stop") if fault == "stop" else time.sleep(30)
    limited = options("Allreduce", timeout=timedelta(seconds=2))
    error_type, text, seconds = error_of(lambda: pg.allreduce([filled()], limited))
    assert error_type == ("CollectiveTimeoutError" if job.rank == 0 else "GroupPoisonedError"), text
    assert "between hosts" in text
    assert job.rank == 1 or seconds < 3.0


RANK_THAT_FAILS = """
import os, signal
from datetime import timedelta
import torch, torch.distributed as dist
import ray_fracbackend.ipc
dist.init_process_group("ipc", timeout=timedelta(seconds=20))
dist.barrier()
if dist.get_rank() == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
work = dist.all_reduce(torch.ones(4), async_op=True, group=dist.new_group(ranks=[0, 1]))
work.wait()
dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=3))
queued = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
dist.barrier()
"""


@pytest.mark.full
def test_a_process_ends_by_itself_after_a_failure() -> None:
    """With a group that was not shut down, calls in its queue and a stopped peer, the interpreter still ends."""
    store = open_local_store()
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "3"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", RANK_THAT_FAILS]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(r)}, stderr=subprocess.PIPE) for r in range(3)]
    try:
        for rank in ranks[:2]:
            _, text = rank.communicate(timeout=90)
            assert rank.returncode == 1, text
            assert b"rank 2" in text
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(100, 200))])
def test_random_faults_in_random_schedules(seed: int) -> None:
    """After any fault at any time, every surviving rank raises an error soon."""
    check_random(seed, "host", SMALL_CHUNKS)


@pytest.mark.parametrize("ends", [("abort", "abort", "shutdown"), ("shutdown", "shutdown", "abort")])
@on_ranks(2)
def test_abort_and_shutdown_can_be_repeated(job: Job, ends: tuple[str, ...]) -> None:
    """A second abort or shutdown does nothing, and a later call raises GroupClosedError."""
    pg = bare_group(job, "ends", job.rank, job.size, 30.0)
    pg.barrier(options("Barrier"))
    pg.barrier(options("Barrier"))
    for end in ends:
        getattr(pg, end)()
    for call in (lambda: pg.barrier(options("Barrier")), lambda: pg.allreduce([filled(4)]).wait()):
        with pytest.raises(GroupClosedError):
            call()


@on_ranks(2, limit_s=60)
def test_abort_ends_a_call_in_progress_on_every_rank(job: Job) -> None:
    """Rank 0 waits for rank 1, which is late; a thread of rank 0 aborts: both raise that."""
    pg = bare_group(job, "thread", job.rank, job.size, 30.0)
    if job.rank == 1:
        time.sleep(1.5)
    else:
        threading.Timer(0.5, pg.abort).start()
    with pytest.raises(GroupPoisonedError, match="rank 0 aborted the process group"):
        pg.barrier(options("Barrier"))


@on_ranks(2, limit_s=20)
def test_an_asynchronous_failure_shows_in_wait_and_in_the_future(job: Job) -> None:
    """Both raise an error, and the process survives; with Future.set_exception it would not."""
    pg = bare_group(job, "async", job.rank, job.size, 20.0)
    pg.set_timeout(timedelta(seconds=0.3))
    if job.rank == 1:
        time.sleep(1.5)
        return
    work = pg.allreduce([filled(4)], options("Allreduce", asyncOp=True))
    text = error_of(work.get_future().wait)[1]
    assert "rank 1" in text
    assert "did not reach all_reduce(float32[4], SUM) in time" in text
    assert error_of(work.wait)[0] == "CollectiveTimeoutError"
    assert "rank 1" in str(work.exception())
    assert not work.is_success()


@pytest.mark.parametrize(
    "cls", [CollectiveMismatchError, CollectiveTimeoutError, GroupClosedError, GroupPoisonedError, PeerLostError]
)
def test_errors_survive_pickling(cls: type[Exception]) -> None:
    """Errors cross processes in Ray, so each one must be unchanged after pickling."""
    copy = pickle.loads(pickle.dumps(cls("text")))
    assert (type(copy), str(copy)) == (cls, "text")


def test_no_shared_memory_outlives_its_ranks() -> None:
    """After all of the above no process maps an arena, and none has a name. Concurrent tests have their own."""
    assert not [name for name in os.listdir("/dev/shm") if "ray_fracbackend" in name]
    for process in psutil.Process().children(recursive=True):
        maps = Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or "ray_fracbackend_ipc" not in maps.read_text()
