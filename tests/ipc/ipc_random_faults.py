"""Random faults in random schedules of collectives, with host memory or on a device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipc_calls
import ipc_device_calls
import ipc_staged_calls
import torch
from ipc_calls import options
from ipc_fault_runs import error_of, strike
from ipc_harness import Job, run_ranks

_GROUP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Memory:
    """Collectives and faults for a kind of memory.

    Attributes:
        group: Creates a process group.
        calls: Collectives by name; each accepts the group.
        points: Points at which a collective can fail, for a number of ranks.
        strike_at: Makes a group call a function at a point.
    """

    group: Callable[..., Any]
    calls: Mapping[str, Callable[[Any], Any]]
    points: Callable[[str, int], Sequence[Any]]
    strike_at: Callable[[Any, Any, Callable[[], None]], None]


MEMORIES = {
    "host": Memory(
        ipc_calls.bare_group,
        ipc_calls.CALLS,
        lambda name, num_ranks: ipc_calls.points(ipc_calls.CALLS[name], num_ranks),
        ipc_calls.at_point,
    ),
    "device": Memory(
        ipc_device_calls.device_group,
        ipc_device_calls.CALLS,
        lambda name, _: ipc_device_calls.phases(name),
        ipc_device_calls.strike_at,
    ),
    "staged": Memory(
        ipc_staged_calls.staged_group, ipc_device_calls.CALLS, ipc_staged_calls.points, ipc_staged_calls.strike_at
    ),
}


def check_random(seed: int, memory: str, env: Mapping[str, str]) -> None:
    """Run one random schedule: every rank ends with an error, and none because of a timeout."""
    num_ranks = random.Random(seed).choice([2, 3, 4])
    for outcome in run_ranks(random_work, num_ranks, seed, memory, limit_s=120, env=env):
        assert not isinstance(outcome.error, TimeoutError), f"seed {seed}: {outcome}"
        if outcome.exitcode is None:
            assert outcome.error is None, f"seed {seed}: {outcome.trace}"
            assert outcome.value not in ("", "CollectiveTimeoutError"), f"seed {seed}: {outcome}"


def random_work(job: Job, seed: int, memory: str) -> str:
    """Run random collectives with random pauses until the group breaks; return the class of the error, or the fault."""
    torch.set_num_threads(1)
    shared, own = random.Random(seed), random.Random(f"{seed}/{job.rank}")
    kind = MEMORIES[memory]
    pg = kind.group(job, "random", job.rank, job.size, _GROUP_TIMEOUT_S)
    victim, fault = shared.randrange(job.size), shared.choice(["kill", "raise", "abort", "mismatch", "shutdown"])
    last = shared.randrange(1, 60)
    for number in range(100_000):
        name = shared.choice(list(kind.calls))
        if own.random() < 0.1:
            time.sleep(own.random() * 0.005)
        if number == last and job.rank == victim:
            point = shared.choice(kind.points(name, job.size))
            error = error_of(lambda name=name, point=point: _break(kind, pg, fault, name, point))
            assert ipc_device_calls.comes_free(pg)
            return error[0] or fault
        error = error_of(lambda name=name: kind.calls[name](pg).wait())
        if error[0]:
            assert ipc_device_calls.comes_free(pg)
            return error[0]
    raise AssertionError("the fault had no effect")


def _break(kind: Memory, pg: Any, fault: str, name: str, point: Any) -> None:
    """Break the group in the given way."""
    if fault in ("kill", "raise"):
        kind.strike_at(pg, point, lambda: strike(fault))
    elif fault == "abort":
        pg.abort()
        return
    elif fault == "shutdown":
        pg.shutdown()
        return
    else:
        name = "all_reduce_small" if name == "barrier" else "barrier"
    kind.calls[name](pg).wait()
    # If a rank fails after its last publication, the others finish; the next call must report it.
    pg.barrier(options("Barrier")).wait()
