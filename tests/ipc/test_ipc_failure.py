"""Failures of a group: random schedules, deaths at bad moments, abort and shutdown, errors.

test_ipc_faults.py tests single faults at every phase.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ipc_calls import CALLS, SMALL_CHUNKS, bare_group, filled, options
from ipc_fault_runs import error_of, strike
from ipc_harness import Job, open_local_store, run_ranks, values
from ipc_random_faults import check_random

from ray_fracbackend.ipc import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupPoisonedError,
    PeerLostError,
)


def uneven_splits(job: Job) -> tuple[str, str, float]:
    """Run an all_to_all whose sides disagree about a size."""
    pg = bare_group(job, "splits", job.rank, job.size, 30.0)
    sizes = [2, 2] if job.rank == 0 else [3, 4]
    out = torch.empty(sum(sizes))
    return error_of(lambda: pg.all_to_all_single(out, filled(5), sizes, [2, 3], options("AllToAll")))


def test_splits_that_disagree_are_named() -> None:
    """Both ranks raise an error if one expects other sizes than the peer sends."""
    for error_type, text, _ in values(run_ranks(uneven_splits, 2, limit_s=120)):
        assert error_type in ("CollectiveMismatchError", "GroupPoisonedError")
        assert "rank 1 sends 12 bytes to rank 1, which expects 16" in text


def busy_and_dead(job: Job) -> tuple[str, str, float]:
    """Rank 1, the first for which rank 0 waits, is busy until rank 0 has raised; rank 2 dies meanwhile."""
    pg = bare_group(job, "busy", job.rank, job.size, 30.0)
    pg.barrier(options("Barrier"))
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=60))
    if job.rank == 1:
        store.wait(["rank 0 has raised"])
    elif job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(lambda: pg.barrier(options("Barrier")))
    store.set("rank 0 has raised", "")
    return error


def test_a_death_is_noticed_while_another_rank_is_waited_for() -> None:
    """Rank 0 does not wait for the end of rank 1's delay before it checks rank 2."""
    outcomes = run_ranks(busy_and_dead, 3, limit_s=60)
    error_type, text, _ = values(outcomes[:1])[0]
    assert (error_type, "rank 2" in text) == ("PeerLostError", True)
    assert values(outcomes[1:2])[0][0] == "GroupPoisonedError"


def killed_between_hosts(job: Job, victim: int, name: str) -> tuple[str, str, float]:
    """A rank dies in the second of a few collectives between hosts."""
    torch.set_num_threads(1)
    pg = bare_group(job, "hosts", job.rank, job.size, 60.0)
    pg.barrier(options("Barrier"))
    if job.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: (CALLS[name](pg), CALLS[name](pg), pg.barrier(options("Barrier"))))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_death_in_one_place_is_noticed_in_the_other(victim: int, name: str) -> None:
    """Leader or not, all survivors on both hosts raise an error, and none because of a timeout."""
    env = lambda rank: {**SMALL_CHUNKS, "RAY_FRACBACKEND_IPC_HOST": "aabb"[rank]}  # noqa: E731
    outcomes = run_ranks(killed_between_hosts, 4, victim, name, limit_s=50, env=env)
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        error_type, text, _ = values([outcome])[0]
        assert error_type not in ("", "CollectiveTimeoutError"), (outcome.rank, text)


def stopped_between_hosts(job: Job) -> tuple[str, str, float]:
    """The only rank of the other host stops; the call's own time limit is much shorter than the group's."""
    pg = bare_group(job, "stopped", job.rank, job.size, 60.0)
    pg.barrier(options("Barrier"))
    if job.rank == 2:
        strike("stop")
    limited = options("Allreduce", timeout=timedelta(seconds=1))
    return error_of(lambda: pg.allreduce([filled()], limited))


def test_a_time_limit_of_a_call_holds_between_hosts() -> None:
    """Leader and member raise CollectiveTimeoutError after the call's one second, not after the group's minute."""
    env = lambda rank: {**SMALL_CHUNKS, "RAY_FRACBACKEND_IPC_HOST": "aab"[rank]}  # noqa: E731
    # Less than the group's own limit.
    for error_type, text, _ in values(run_ranks(stopped_between_hosts, 3, limit_s=50, env=env, needed=2)[:2]):
        assert error_type in ("CollectiveTimeoutError", "GroupPoisonedError"), text


def absent_between_hosts(job: Job) -> tuple[str, str, float]:
    """The only rank of the other host never calls."""
    pg = bare_group(job, "absent", job.rank, job.size, 60.0)
    pg.barrier(options("Barrier"))
    if job.rank == 2:
        time.sleep(30.0)
    limited = options("Allreduce", timeout=timedelta(seconds=2))
    return error_of(lambda: pg.allreduce([filled()], limited))


def test_a_rank_that_waits_for_another_host_is_not_blamed() -> None:
    """Rank 1 waits for rank 0, which waits for rank 2: rank 0 knows more, and has only one limit for the whole call."""
    env = lambda rank: {**SMALL_CHUNKS, "RAY_FRACBACKEND_IPC_HOST": "aab"[rank]}  # noqa: E731
    leader, member = values(run_ranks(absent_between_hosts, 3, limit_s=25, env=env, needed=2)[:2])
    assert leader[0] == "CollectiveTimeoutError"
    assert "between hosts" in leader[1]
    assert member[0] == "GroupPoisonedError", member[1]
    assert "between hosts" in member[1]
    assert "Look there first" not in member[1]
    assert leader[2] < 3.0


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
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_THAT_FAILS], env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks[:2]:
            _, text = rank.communicate(timeout=90)
            assert rank.returncode == 1, text
            assert b"rank 2" in text
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("seed", range(6))
def test_random_faults_in_random_schedules(seed: int) -> None:
    """After any fault at any time, every surviving rank raises an error soon."""
    check_random(seed, "host", SMALL_CHUNKS)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_faults_in_random_schedules(seed: int) -> None:
    """As above, a hundred more times."""
    check_random(seed, "host", SMALL_CHUNKS)


def use_after_end(job: Job) -> list[str]:
    """Call abort and shutdown several times, in both orders, with calls in between."""
    texts = []
    for number, verbs in enumerate((("abort", "abort", "shutdown"), ("shutdown", "shutdown", "abort"))):
        pg = bare_group(job, str(number), job.rank, job.size, 30.0)
        pg.barrier(options("Barrier"))
        pg.barrier(options("Barrier"))
        for verb in verbs:
            getattr(pg, verb)()
        texts.append(error_of(lambda pg=pg: pg.barrier(options("Barrier")))[0])
        texts.append(error_of(lambda pg=pg: pg.allreduce([filled(4)]).wait())[0])
    return texts


def test_abort_and_shutdown_can_be_repeated() -> None:
    """A second abort or shutdown does nothing, and a later call raises GroupClosedError."""
    for texts in values(run_ranks(use_after_end, 2, limit_s=120)):
        assert texts == ["GroupClosedError"] * 4


def abort_from_a_thread(job: Job) -> tuple[str, str, float]:
    """Rank 0 waits for rank 1, which never comes; a thread of rank 0 aborts."""
    import threading

    pg = bare_group(job, "thread", job.rank, job.size, 30.0)
    if job.rank == 1:
        time.sleep(1.5)
        return error_of(lambda: pg.barrier(options("Barrier")))
    threading.Timer(0.5, pg.abort).start()
    return error_of(lambda: pg.barrier(options("Barrier")))


def test_abort_ends_a_call_in_progress_on_every_rank() -> None:
    """The waiting rank and the late one both raise that rank 0 aborted."""
    for error_type, text, _ in values(run_ranks(abort_from_a_thread, 2, limit_s=60)):
        assert error_type == "GroupPoisonedError"
        assert "rank 0 aborted the process group" in text


def fail_asynchronously(job: Job) -> tuple[str, str, str, bool]:
    """Return the errors of wait() and of the future of a failed asynchronous call."""
    pg = bare_group(job, "async", job.rank, job.size, 20.0)
    pg.set_timeout(timedelta(seconds=0.3))
    if job.rank == 1:
        time.sleep(1.5)
        return "", "", "", False
    work = pg.allreduce([filled(4)], options("Allreduce", asyncOp=True))
    future = work.get_future()
    by_future = error_of(future.wait)
    by_wait = error_of(work.wait)
    return by_future[1], by_wait[0], str(work.exception()), work.is_success()


def test_an_asynchronous_failure_shows_in_wait_and_in_the_future() -> None:
    """Both raise an error, and the process survives; with Future.set_exception it would not."""
    by_future, by_wait, exception, success = values(run_ranks(fail_asynchronously, 2, limit_s=20))[0]
    assert "did not reach all_reduce(float32[4], SUM) in time" in by_future
    assert by_wait == "CollectiveTimeoutError"
    assert "rank 1" in exception
    assert not success


def test_errors_survive_pickling() -> None:
    """Errors cross processes in Ray, so each one must be unchanged after pickling."""
    import pickle

    for cls in (CollectiveMismatchError, CollectiveTimeoutError, GroupClosedError, GroupPoisonedError, PeerLostError):
        copy = pickle.loads(pickle.dumps(cls("text")))
        assert type(copy) is cls
        assert str(copy) == "text"


def test_no_shared_memory_outlives_its_ranks() -> None:
    """After all of the above no process maps an arena, and none has a name. Concurrent tests have their own."""
    assert not [name for name in os.listdir("/dev/shm") if "ray_fracbackend" in name]
    processes = psutil.Process().children(recursive=True)
    assert [p for p in processes if "ray_fracbackend_ipc" in _read(Path(f"/proc/{p.pid}/maps"))] == []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
