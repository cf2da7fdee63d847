"""Faults of a rank in a collective on a device, in any memory, and the errors that the others must raise.

Every victim is a separate process, because a process that has used CUDA cannot be forked.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from ipc_calls import options, shared_names
from ipc_device_calls import CALLS, FREE_S, comes_free, device_group, phases, strike_at
from ipc_fault_runs import error_of, strike
from ipc_harness import Job, run_ranks, values
from ipc_random_faults import MEMORIES

from ray_fracbackend.ipc.protocol.local import LEADER
from ray_fracbackend.ipc.protocol.schedule import Action


def call_then_barrier(pg: Any, name: str) -> None:
    """If a rank fails after its last publication, the others finish; the next call must report it."""
    CALLS[name](pg).wait()
    pg.barrier(options("Barrier")).wait()


def struck_by_signal(
    job: Job, memory: str, name: str, points: list[Any], kind: str, timeout_s: float, survivors: int
) -> Any:
    """The first ranks survive one group per point, each with a different victim, and report each error."""
    torch.set_num_threads(1)
    errors = []
    for number, point in enumerate(points):
        victim = survivors + number
        members = (*range(survivors), victim)
        if job.rank not in members:
            continue
        rank = min(job.rank, survivors)
        pg = MEMORIES[memory].group(job, f"{name}{number}", rank, survivors + 1, 60.0, members)
        pg.set_timeout(timedelta(seconds=timeout_s))
        if job.rank == victim:
            MEMORIES[memory].strike_at(pg, point, lambda: strike(kind))
        error = error_of(lambda pg=pg: call_then_barrier(pg, name))
        errors.append((point, *error))
        again = error_of(lambda pg=pg: pg.barrier(options("Barrier")).wait())
        if again[0] != "GroupPoisonedError" or again[2] > 5:
            errors.append((point, *again))
        if not comes_free(pg):
            errors.append((point, "StuckStream", "the device does not come free", FREE_S))
        pg.shutdown()
    return errors


def check_signal(
    name: str,
    kind: str,
    timeout_s: float,
    allowed: set[str],
    env: Mapping[str, str],
    points: list[Any] | None = None,
    memory: str = "device",
    limit_s: float = 200,
    survivors: int = 2,
) -> None:
    """Run a collective with a victim at each point of its memory, or at `points`, and check the survivors' reports.

    The survivors' device becomes free each time, so they continue with the next group.
    """
    before = shared_names()
    points = points or list(MEMORIES[memory].points(name, survivors + 1))
    args = memory, name, points, kind, timeout_s, survivors
    outcomes = run_ranks(struck_by_signal, survivors + len(points), *args, limit_s=limit_s, env=env, needed=survivors)
    for reports in values(outcomes[:survivors]):
        assert [report[0] for report in reports] == points
        for point, error_type, text, seconds in reports:
            assert error_type in allowed, (point, error_type, text)
            assert seconds < timeout_s + 10, (point, text)
            assert "rank" in text or "Gloo" in text
    assert shared_names() <= before


def struck_by_exception(job: Job, names: list[str]) -> list[Any]:
    """Run these collectives with a fault at every phase, each in a new group; the last rank raises an error, or the leader in a FOLD."""
    torch.set_num_threads(1)
    reports = []
    for name in names:
        for action in phases(name):
            pg = device_group(job, f"{name}/{action.name}", job.rank, job.size, 60.0)
            if job.rank == (LEADER if action is Action.FOLD else job.size - 1):
                strike_at(pg, action, lambda: strike("raise"))
            error = error_of(lambda pg=pg, name=name: call_then_barrier(pg, name))
            reports.append((name, action.name, *error))
            if not comes_free(pg):
                reports.append((name, action.name, "StuckStream", "the device does not come free", FREE_S))
            pg.shutdown()
    return reports
