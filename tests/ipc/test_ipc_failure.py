"""Failures of a group: random schedules, deaths at bad moments, abort and shutdown, errors.

test_ipc_faults.py tests single faults at every phase.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from ipc_calls import CALLS, SMALL_CHUNKS, bare_group, error_of, filled, options, strike
from ipc_harness import Job, on_ranks, run_ranks, values
from ipc_memories import check_random

from ray_fracbackend.ipc import (
    GroupClosedError,
    GroupPoisonedError,
)

HOST = "RAY_FRACBACKEND_IPC_HOST"


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
