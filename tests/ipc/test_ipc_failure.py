"""Failures of a group: random schedules, deaths at bad moments, abort and shutdown, errors.

test_ipc_faults.py tests single faults at every phase.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from ipc_calls import SMALL_CHUNKS, bare_group, error_of, filled, options, strike
from ipc_harness import Job, on_ranks
from ipc_memories import check_random

from ray_fracbackend.ipc import GroupClosedError, GroupPoisonedError


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
