"""A rank is killed, stopped, raises or calls something else, at every phase of every collective: nobody hangs."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ipc_calls import CALLS, bare_group, filled, options, phases, strike_at
from ipc_harness import Job, run_ranks, values
from torch.distributed import ReduceOp

from ray_fracbackend.ipc import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupPoisonedError,
    IpcError,
    PeerLostError,
)

SMALL_CHUNKS = {"RAY_FRACBACKEND_IPC_CHUNK_BYTES": "65536"}
SURVIVORS = 2


def error_of(function: Any) -> tuple[str, str, float]:
    """Type, text and seconds of what a call raises; an empty type if it returns."""
    started = time.monotonic()
    try:
        function()
    except IpcError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    except RuntimeError as error:
        return "RuntimeError", str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def call_then_barrier(pg: Any, name: str) -> None:
    """A rank struck after its last publication lets the others finish; the next call must tell them."""
    CALLS[name](pg)
    pg.barrier(options("Barrier"))


def strike(kind: str) -> None:
    """Kill or stop this process."""
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def struck_by_signal(job: Job, name: str, kind: str, timeout_s: float) -> Any:
    """Ranks 0 and 1 survive one group per phase with a victim of its own, and report each error."""
    torch.set_num_threads(1)
    errors = []
    for number, action in enumerate(phases(name)):
        victim = SURVIVORS + number
        if job.rank not in (0, 1, victim):
            continue
        rank = min(job.rank, SURVIVORS)
        pg = bare_group(job, f"{name}{number}", rank, SURVIVORS + 1, 20.0, (0, 1, victim))
        pg.set_timeout(timedelta(seconds=timeout_s))
        if job.rank == victim:
            strike_at(pg, action, lambda: strike(kind))
        error = error_of(lambda pg=pg: call_then_barrier(pg, name))
        errors.append((action.name, *error))
        again = error_of(lambda pg=pg: pg.barrier(options("Barrier")))
        if again[0] != "GroupPoisonedError" or again[2] > 0.5:
            errors.append((action.name, *again))
        pg.shutdown()
    return errors


def check_signal(name: str, kind: str, timeout_s: float, allowed: set[str]) -> None:
    """Run a collective with a victim at each phase and check what the survivors report."""
    before = sorted(os.listdir("/dev/shm"))
    size = SURVIVORS + len(phases(name))
    outcomes = run_ranks(struck_by_signal, size, name, kind, timeout_s, limit_s=60, env=SMALL_CHUNKS, needed=SURVIVORS)
    for reports in values(outcomes[:SURVIVORS]):
        assert [report[0] for report in reports] == [action.name for action in phases(name)]
        for phase, error_type, text, seconds in reports:
            assert error_type in allowed, (phase, error_type, text)
            assert seconds < timeout_s + 1.5, (phase, text)
            assert "rank" in text
    assert sorted(os.listdir("/dev/shm")) == before


@pytest.mark.parametrize("name", CALLS)
def test_a_killed_rank_is_reported_at_every_phase(name: str) -> None:
    """Both survivors raise at once, not at the 20 s deadline, and nothing is left in /dev/shm."""
    check_signal(name, "kill", 20.0, {"PeerLostError", "GroupPoisonedError"})


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_stopped_rank_is_reported_at_every_phase(name: str) -> None:
    """Both survivors raise when the deadline has passed."""
    check_signal(name, "stop", 0.5, {"CollectiveTimeoutError", "GroupPoisonedError"})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("all_reduce", "broadcast")])
def test_a_stopped_rank_is_reported_by_every_other_collective(name: str) -> None:
    """As for all_reduce and broadcast."""
    check_signal(name, "stop", 0.5, {"CollectiveTimeoutError", "GroupPoisonedError"})


class InjectedError(RuntimeError):
    """Stands for any error inside a collective, such as a failed allocation."""


def raise_injected() -> None:
    """Fail."""
    raise InjectedError("injected")


def struck_by_exception(job: Job, names: list[str]) -> list[Any]:
    """These collectives at every phase, each in a fresh group; the last rank raises inside the call."""
    torch.set_num_threads(1)
    reports = []
    for name in names:
        for action in phases(name):
            pg = bare_group(job, f"{name}/{action.name}", job.rank, job.size, 20.0)
            if job.rank == job.size - 1:
                strike_at(pg, action, raise_injected)
            error = error_of(lambda pg=pg, name=name: call_then_barrier(pg, name))
            reports.append((name, action.name, *error))
            pg.shutdown()
    return reports


# The rest have the same actions in the same order; they run with the slow tests.
USUAL = ["all_reduce", "broadcast", "all_to_all"]


@pytest.mark.parametrize("names", [USUAL, pytest.param(sorted(CALLS.keys() - USUAL), marks=pytest.mark.slow)])
def test_an_exception_at_any_phase_reaches_every_rank(names: list[str]) -> None:
    """The rank that failed raises its own error; the others raise it by name, long before the deadline."""
    size = 3
    for rank, reports in enumerate(values(run_ranks(struck_by_exception, size, names, limit_s=90, env=SMALL_CHUNKS))):
        for name, phase, error_type, text, seconds in reports:
            assert "injected" in text, (name, phase, error_type, text)
            assert error_type == ("RuntimeError" if rank == size - 1 else "GroupPoisonedError")
            assert seconds < 5, (name, phase)


MISMATCHES: dict[str, tuple[Any, Any, list[str]]] = {
    "operation": (CALLS["all_reduce"], CALLS["broadcast"], ["all_reduce(float32[66000], SUM)", "broadcast(", "root 0"]),
    "barrier": (CALLS["barrier"], CALLS["all_reduce_small"], ["barrier", "all_reduce(float32[4], SUM)"]),
    "size": (
        lambda pg: pg.allreduce([filled(8)], options("Allreduce")),
        lambda pg: pg.allreduce([filled(9)], options("Allreduce")),
        ["float32[8]", "float32[9]"],
    ),
    "chunks": (
        lambda pg: pg.allreduce([filled(8)], options("Allreduce")),
        lambda pg: pg.allreduce([filled(99_999)], options("Allreduce")),
        ["float32[8]", "float32[99999]"],
    ),
    "dtype": (
        lambda pg: pg.allreduce([filled(8)], options("Allreduce")),
        lambda pg: pg.allreduce([filled(8).double()], options("Allreduce")),
        ["float32[8]", "float64[8]"],
    ),
    "reduce op": (
        lambda pg: pg.allreduce([filled(8)], options("Allreduce")),
        lambda pg: pg.allreduce([filled(8)], options("Allreduce", reduceOp=ReduceOp.MAX)),
        ["SUM", "MAX"],
    ),
    "root": (
        lambda pg: pg.broadcast([filled(8)], options("Broadcast", rootRank=0)),
        lambda pg: pg.broadcast([filled(8)], options("Broadcast", rootRank=1)),
        ["root 0", "root 1"],
    ),
    "through Gloo": (
        lambda pg: pg.allreduce([filled(8)], options("Allreduce")),
        lambda pg: pg.allreduce([filled(8).to_sparse()], options("Allreduce")),
        ["all_reduce"],
    ),
}


def mismatching(job: Job) -> dict[str, Any]:
    """Every pair of disagreeing calls, each in a fresh group; the last rank makes the other call."""
    torch.set_num_threads(1)
    reports = {}
    for name, (usual, other, _) in MISMATCHES.items():
        pg = bare_group(job, name, job.rank, job.size, 5.0)
        call = other if job.rank == job.size - 1 else usual
        reports[name] = error_of(lambda pg=pg, call=call: (call(pg), pg.barrier(options("Barrier"))))
        pg.shutdown()
    return reports


@pytest.mark.parametrize("places", ["aaa", "aab"])
def test_calls_that_disagree_are_named_with_both_sides(places: str) -> None:
    """Every rank raises, in one place as between two, and the text shows what each side called."""
    env = lambda rank: {**SMALL_CHUNKS, "RAY_FRACBACKEND_IPC_PLACE": places[rank]}  # noqa: E731
    for reports in values(run_ranks(mismatching, len(places), limit_s=60, env=env)):
        for name, (error_type, text, seconds) in reports.items():
            assert error_type in ("CollectiveMismatchError", "GroupPoisonedError"), (name, error_type, text)
            assert seconds < 4, name
            for part in MISMATCHES[name][2]:
                assert part in text, (name, text)


def uneven_splits(job: Job) -> tuple[str, str, float]:
    """An all_to_all whose sides disagree about a size."""
    pg = bare_group(job, "splits", job.rank, job.size, 5.0)
    sizes = [2, 2] if job.rank == 0 else [3, 4]
    out = torch.empty(sum(sizes))
    return error_of(lambda: pg.all_to_all_single(out, filled(5), sizes, [2, 3], options("AllToAll")))


def test_splits_that_disagree_are_named() -> None:
    """Both ranks raise when one expects other sizes than the peer sends."""
    for error_type, text, _ in values(run_ranks(uneven_splits, 2, limit_s=30)):
        assert error_type in ("CollectiveMismatchError", "GroupPoisonedError")
        assert "rank 1 sends 12 bytes to rank 1, which expects 16" in text


def busy_and_dead(job: Job) -> tuple[str, str, float]:
    """Rank 1, the first that rank 0 waits for, is busy for long; rank 2 dies meanwhile."""
    pg = bare_group(job, "busy", job.rank, job.size, 30.0)
    pg.barrier(options("Barrier"))
    if job.rank == 1:
        time.sleep(4)
    elif job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: pg.barrier(options("Barrier")))


def test_a_death_is_noticed_while_another_rank_is_waited_for() -> None:
    """Rank 0 does not sit out rank 1's delay before it looks at rank 2."""
    outcomes = run_ranks(busy_and_dead, 3, limit_s=20)
    error_type, text, seconds = values(outcomes[:1])[0]
    assert (error_type, "rank 2" in text) == ("PeerLostError", True)
    assert seconds < 2
    assert values(outcomes[1:2])[0][0] == "GroupPoisonedError"


def killed_between_places(job: Job, victim: int, name: str) -> tuple[str, str, float]:
    """A rank dies in the second of a few collectives between places."""
    torch.set_num_threads(1)
    pg = bare_group(job, "places", job.rank, job.size, 8.0)
    pg.barrier(options("Barrier"))
    if job.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: (CALLS[name](pg), CALLS[name](pg), pg.barrier(options("Barrier"))))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_death_in_one_place_is_noticed_in_the_other(victim: int, name: str) -> None:
    """Leader or not, all survivors of both places raise well before the timeout."""
    env = lambda rank: {**SMALL_CHUNKS, "RAY_FRACBACKEND_IPC_PLACE": "aabb"[rank]}  # noqa: E731
    outcomes = run_ranks(killed_between_places, 4, victim, name, limit_s=20, env=env)
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        error_type, text, seconds = values([outcome])[0]
        assert error_type, outcome
        assert seconds < 4, (outcome.rank, text)


def random_work(job: Job, seed: int) -> tuple[str, float]:
    """Random collectives with random pauses until the group breaks; returns the error and its delay."""
    torch.set_num_threads(1)
    shared, own = random.Random(seed), random.Random(f"{seed}/{job.rank}")
    pg = bare_group(job, "random", job.rank, job.size, 10.0)
    victim, fault = shared.randrange(job.size), shared.choice(["kill", "raise", "abort", "mismatch", "shutdown"])
    last = shared.randrange(1, 60)
    for number in range(100_000):
        name = shared.choice(list(CALLS))
        if own.random() < 0.1:
            time.sleep(own.random() * 0.005)
        if number == last and job.rank == victim:
            error = error_of(lambda name=name: random_fault(pg, fault, name, shared.choice(phases(name))))
            return error[0] or fault, error[2]
        error = error_of(lambda name=name: CALLS[name](pg))
        if error[0]:
            return error[0], error[2]
    raise AssertionError("the fault had no effect")


def random_fault(pg: Any, fault: str, name: str, phase: Any) -> None:
    """Break the group in the given way."""
    if fault == "kill":
        strike_at(pg, phase, lambda: strike("kill"))
    elif fault == "raise":
        strike_at(pg, phase, raise_injected)
    elif fault == "abort":
        pg.abort()
        return
    elif fault == "shutdown":
        pg.shutdown()
        return
    else:
        name = "all_reduce_small" if name == "barrier" else "barrier"
    call_then_barrier(pg, name)
    pg.barrier(options("Barrier"))


def check_random(seed: int) -> None:
    """Run one random schedule: every rank ends with an error, well before the limit."""
    rng = random.Random(seed)
    outcomes = run_ranks(random_work, rng.choice([2, 3, 4]), seed, limit_s=40, env=SMALL_CHUNKS)
    for outcome in outcomes:
        assert not isinstance(outcome.error, TimeoutError), f"seed {seed}: {outcome}"
        if outcome.exitcode is None:
            assert outcome.error is None, f"seed {seed}: {outcome.trace}"
            assert outcome.value[0], f"seed {seed}: {outcome}"
            assert outcome.value[1] < 5, f"seed {seed}: {outcome}"


@pytest.mark.parametrize("seed", range(6))
def test_random_faults_in_random_schedules(seed: int) -> None:
    """Whatever breaks whenever, every surviving rank raises soon."""
    check_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_faults_in_random_schedules(seed: int) -> None:
    """As above, a hundred more times."""
    check_random(seed)


def use_after_end(job: Job) -> list[str]:
    """Abort and shutdown several times, in both orders, with calls in between."""
    texts = []
    for number, verbs in enumerate((("abort", "abort", "shutdown"), ("shutdown", "shutdown", "abort"))):
        pg = bare_group(job, str(number), job.rank, job.size, 5.0)
        pg.barrier(options("Barrier"))
        pg.barrier(options("Barrier"))
        for verb in verbs:
            getattr(pg, verb)()
        texts.append(error_of(lambda pg=pg: pg.barrier(options("Barrier")))[0])
        texts.append(error_of(lambda pg=pg: pg.allreduce([filled(4)]).wait())[0])
    return texts


def test_abort_and_shutdown_can_be_repeated() -> None:
    """A second abort or shutdown does nothing, and a later call raises GroupClosedError."""
    for texts in values(run_ranks(use_after_end, 2, limit_s=30)):
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
    """The waiting rank and the one that comes late both raise that rank 0 aborted."""
    for error_type, text, seconds in values(run_ranks(abort_from_a_thread, 2, limit_s=20)):
        assert error_type == "GroupPoisonedError"
        assert "rank 0 aborted the process group" in text
        assert seconds < 2


def fail_asynchronously(job: Job) -> tuple[str, str, str, bool]:
    """What wait() and the future of a failed asynchronous call raise."""
    pg = bare_group(job, "async", job.rank, job.size, 0.3)
    if job.rank == 1:
        time.sleep(1.5)
        return "", "", "", False
    work = pg.allreduce([filled(4)], options("Allreduce", asyncOp=True))
    future = work.get_future()
    by_future = error_of(future.wait)
    by_wait = error_of(work.wait)
    return by_future[1], by_wait[0], str(work.exception()), work.is_success()


def test_an_asynchronous_failure_shows_in_wait_and_in_the_future() -> None:
    """Both raise, and the process survives, which Future.set_exception would not let it."""
    by_future, by_wait, exception, success = values(run_ranks(fail_asynchronously, 2, limit_s=20))[0]
    assert "did not reach all_reduce(float32[4], SUM) in time" in by_future
    assert by_wait == "CollectiveTimeoutError"
    assert "rank 1" in exception
    assert not success


def test_errors_survive_pickling() -> None:
    """Errors cross processes under Ray, so each one must come out of pickle as itself."""
    import pickle

    for cls in (CollectiveMismatchError, CollectiveTimeoutError, GroupClosedError, GroupPoisonedError, PeerLostError):
        copy = pickle.loads(pickle.dumps(cls("text")))
        assert type(copy) is cls
        assert str(copy) == "text"


def test_no_shared_memory_outlives_its_ranks() -> None:
    """After all of the above no process on this machine maps an arena whose ranks are gone, and none has a name."""
    assert not [name for name in os.listdir("/dev/shm") if "ray_fracbackend" in name]
    with_arena = [p for p in Path("/proc").glob("[0-9]*/maps") if "ray_fracbackend_ipc" in _read(p)]
    own_group = [p for p in with_arena if os.getpgid(int(p.parent.name)) == os.getpgid(0)]
    assert own_group == []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
