"""Groups on host memory, on a device and on staged memory; and faults at every point of a collective, or at random, in each.

Every victim is a separate process, because a process that has used CUDA cannot be forked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ipc_calls
import torch
from ipc_calls import DEVICE_CALLS, Call, Striker, bare_group, error_of, options, shared_names, strike
from ipc_harness import Job, run_ranks, values

from ray_fracbackend.ipc import IpcProcessGroup
from ray_fracbackend.ipc.device import staged
from ray_fracbackend.ipc.protocol.engine import Engine
from ray_fracbackend.ipc.protocol.local import LEADER
from ray_fracbackend.ipc.protocol.schedule import Action
from tests.processes import wait_until

LOST = ("PeerLostError", "GroupPoisonedError")
# Time limit of the calls, and errors that the others may raise, by what happens to the victim.
SIGNALS = {"kill": (20.0, LOST), "stop": (2.0, ("CollectiveTimeoutError", "GroupPoisonedError"))}
# Time for a device that a rank has left with waits.
FREE_S = 20.0
# Chunks of 64 KiB in the tensors of `DEVICE_CALLS`.
_NUM_CHUNKS = 5


def device_group(
    job: Job, name: str, rank: int, size: int, timeout_s: float, ranks: tuple[int, ...] = ()
) -> IpcProcessGroup:
    pg = bare_group(job, name, rank, size, timeout_s, ranks)
    DEVICE_CALLS["all_reduce_small"](pg).wait()  # with torch 2.7 every call without init_process_group is asynchronous
    engine_of(pg)
    return pg


def staged_group(job: Job, name: str, rank: int, size: int, timeout_s: float, ranks: tuple[int, ...] = ()) -> Any:
    """Create a process group that has staged a tensor."""
    pg = bare_group(job, name, rank, size, timeout_s, ranks)
    DEVICE_CALLS["all_reduce_small"](pg).wait()
    assert isinstance(pg._device_side._collectives, staged.StagedCollectives)
    return pg


def engine_of(pg: IpcProcessGroup) -> Engine:
    """Return the engine that runs this rank's calls on the device."""
    lane = pg._device_side._lane
    assert lane is not None, pg.staged_reason
    return lane.engine


def comes_free(pg: Any) -> bool:
    """Return whether all work of this rank's device finishes, whatever happened to the other ranks."""
    events = []
    for stream in pg._device_side._streams.values():
        with stream.runtime.on(stream.stream):
            events.append(stream.runtime.new_event())
            events[-1].record(stream.stream)
    return wait_until(lambda: all(event.query() for event in events), FREE_S)


def phases(name: str) -> list[Action]:
    """Return the actions at which a fault can occur in this collective on a device."""
    return [action for action in Action if action is not Action.FOLD or name == "all_reduce"]


def strike_on_device(pg: IpcProcessGroup, action: Action, strike: Callable[[], None]) -> None:
    """Call `strike` before this rank takes `action` for the first time, see `Striker`; at the latest in a later call on the host.

    Whether a rank has to wait at all depends on the progress of the others.
    """
    striker = engine_of(pg).observer = Striker((action, 0), strike)

    def on_host(action: Action, chunk: int) -> None:
        # Some calls begin with one on the host, before they sign on the device.
        if action is Action.SIGN and Action.SIGN in striker.seen and not striker.is_over:
            striker.is_over = True
            strike()

    pg._local.engine.observer = on_host


def staged_points(name: str) -> list[tuple[str, int]]:
    """Return steps at which a fault can occur: a copy to the host is awaited, the host's part begins, and has ended."""
    if name == "barrier":
        return [("begin", 0), ("end", 0)]
    chunks = [0] if name.endswith("small") else range(_NUM_CHUNKS)
    return [(step, chunk) for chunk in chunks for step in ("copy", "begin", "end")]


_wait_for = staged._wait_for


def strike_staged(pg: Any, point: tuple[str, int], strike: Callable[[], None]) -> None:
    """Call `strike` when this rank reaches the given occurrence of a step of its next calls."""
    seen: dict[str, int] = {}

    def come(step: str) -> None:
        seen[step] = seen.get(step, -1) + 1
        if (step, seen[step]) == point:
            strike()

    def observed_wait(event: Any, terms: Any) -> None:
        come("copy")
        _wait_for(event, terms)

    carrier = pg._device_side._collectives
    carrier._host = _Observed(carrier._host, come)
    staged._wait_for = observed_wait


class _Observed:
    def __init__(self, host: Any, come: Callable[[str], None]) -> None:
        self._host, self._come = host, come
        self.rank, self.num_ranks = host.rank, host.num_ranks

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._host, name)
        if name in ("fail", "raise_if_unusable"):
            return method

        def call(*args: Any) -> Any:
            self._come("begin")
            result = method(*args)
            self._come("end")
            return result

        return call


@dataclass(frozen=True)
class Memory:
    """Collectives and faults for a kind of memory.

    Attributes:
        group: Creates a process group.
        calls: Collectives by name.
        points: Points at which a collective can fail, for a number of ranks.
        strike_at: Makes a group call a function at a point.
    """

    group: Callable[..., Any]
    calls: Mapping[str, Call]
    points: Callable[[str, int], Sequence[Any]]
    strike_at: Callable[[Any, Any, Callable[[], None]], None]


MEMORIES = {
    "host": Memory(
        bare_group,
        ipc_calls.CALLS,
        lambda name, num_ranks: ipc_calls.points(ipc_calls.CALLS[name], num_ranks),
        ipc_calls.at_point,
    ),
    "device": Memory(device_group, DEVICE_CALLS, lambda name, _: phases(name), strike_on_device),
    "staged": Memory(staged_group, DEVICE_CALLS, lambda name, _: staged_points(name), strike_staged),
}


def call_then_barrier(memory: str, pg: Any, name: str) -> None:
    """If a rank fails after its last publication, the others finish; the next call must report it."""
    MEMORIES[memory].calls[name](pg).wait()
    pg.barrier(options("Barrier")).wait()


def struck_by_signal(job: Job, memory: str, name: str, points: list[Any], kind: str, survivors: int) -> None:
    """The first ranks survive one group per point, each with a different victim, and check each error."""
    torch.set_num_threads(1)
    timeout_s, allowed = SIGNALS[kind]
    for number, point in enumerate(points):
        victim = survivors + number
        members = (*range(survivors), victim)
        if job.rank not in members:
            continue
        pg = MEMORIES[memory].group(job, str(number), min(job.rank, survivors), survivors + 1, 150.0, members)
        pg.set_timeout(timedelta(seconds=timeout_s))
        if job.rank == victim:
            MEMORIES[memory].strike_at(pg, point, lambda: strike(kind))
        error_type, text, seconds = error_of(lambda pg=pg: call_then_barrier(memory, pg, name))
        assert error_type in allowed, (point, error_type, text)
        assert seconds < timeout_s + 10, (point, text)
        assert "rank" in text or "Gloo" in text
        again = error_of(lambda pg=pg: pg.barrier(options("Barrier")).wait())
        assert again[0] == "GroupPoisonedError", (point, again)
        assert again[2] < 5, (point, again)
        assert comes_free(pg), point
        pg.shutdown()


def check_signal(
    name: str,
    kind: str,
    env: Mapping[str, str],
    points: list[Any] | None = None,
    memory: str = "device",
    limit_s: float = 200,
    survivors: int = 2,
) -> None:
    """Run a collective with a victim at each point of its memory, or at `points`: the survivors raise, and go on in the next group."""
    before = shared_names()
    points = points or list(MEMORIES[memory].points(name, survivors + 1))
    args = memory, name, points, kind, survivors
    outcomes = run_ranks(struck_by_signal, survivors + len(points), *args, limit_s=limit_s, env=env, needed=survivors)
    values(outcomes[:survivors])
    assert shared_names() <= before


def struck_by_exception(job: Job, memory: str) -> None:
    """A rank raises an error at every point of an all_reduce, each in a new group: the last rank, or the leader in a FOLD."""
    torch.set_num_threads(1)
    for point in MEMORIES[memory].points("all_reduce", job.size):
        pg = MEMORIES[memory].group(job, str(point), job.rank, job.size, 60.0)
        struck = LEADER if point is Action.FOLD else job.size - 1
        if job.rank == struck:
            MEMORIES[memory].strike_at(pg, point, lambda: strike("raise"))
        error_type, text, seconds = error_of(lambda pg=pg: call_then_barrier(memory, pg, "all_reduce"))
        assert "injected" in text, (point, error_type, text)
        assert error_type == ("RuntimeError" if job.rank == struck else "GroupPoisonedError"), (point, text)
        assert seconds < 15
        assert comes_free(pg), point
        staged._wait_for = _wait_for
        pg.shutdown()


def check_exceptions(size: int, env: Mapping[str, str], memory: str = "device", limit_s: float = 120) -> None:
    """The failed rank raises its own error; the others raise an error with its message soon."""
    values(run_ranks(struck_by_exception, size, memory, limit_s=limit_s, env=env))


def check_random(seed: int, memory: str, env: Mapping[str, str]) -> None:
    """Run one random schedule: every rank ends with an error, and none because of a timeout."""
    num_ranks = random.Random(seed).choice([2, 3, 4])
    for outcome in run_ranks(random_work, num_ranks, seed, memory, env=env):
        assert not isinstance(outcome.error, TimeoutError), f"seed {seed}: {outcome}"
        if outcome.exitcode is None:
            assert outcome.error is None, f"seed {seed}: {outcome.trace}"
            assert outcome.value not in ("", "CollectiveTimeoutError"), f"seed {seed}: {outcome}"


def random_work(job: Job, seed: int, memory: str) -> str:
    """Run random collectives with random pauses until the group breaks; return the class of the error, or the fault."""
    torch.set_num_threads(1)
    shared, own = random.Random(seed), random.Random(f"{seed}/{job.rank}")
    kind = MEMORIES[memory]
    pg = kind.group(job, "random", job.rank, job.size, 60.0)
    victim, fault = shared.randrange(job.size), shared.choice(["kill", "raise", "abort", "mismatch", "shutdown"])
    last = shared.randrange(1, 60)
    for number in range(100_000):
        name = shared.choice(list(kind.calls))
        if own.random() < 0.1:
            time.sleep(own.random() * 0.005)
        if number == last and job.rank == victim:
            point = shared.choice(kind.points(name, job.size))
            error = error_of(lambda name=name, point=point: _break(kind, pg, fault, name, point))
            assert comes_free(pg)
            return error[0] or fault
        error = error_of(lambda name=name: kind.calls[name](pg).wait())
        if error[0]:
            assert comes_free(pg)
            return error[0]
    raise AssertionError("the fault had no effect")


def _break(kind: Memory, pg: Any, fault: str, name: str, point: Any) -> None:
    if fault in ("abort", "shutdown"):
        getattr(pg, fault)()
        return
    if fault == "mismatch":
        name = "all_reduce_small" if name == "barrier" else "barrier"
    else:
        kind.strike_at(pg, point, lambda: strike(fault))
    kind.calls[name](pg).wait()
    # If a rank fails after its last publication, the others finish; the next call must report it.
    pg.barrier(options("Barrier")).wait()
