"""Positions of the fences. x86 tolerates a missing one in nearly every run, so the positions are tested, not their effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipc_calls import CALLS, SMALL_CHUNKS, bare_group
from ipc_harness import Job, on_ranks

from ray_fracbackend.ipc import knobs


def logged(log: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that writes its name into a log."""

    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return function(*args, **kwargs)

    return call


def with_log(job: Job) -> tuple[Any, list[str]]:
    """Return a group, and a log of its fences and of the stores of this rank's counter."""
    pg, log = bare_group(job, "fences", job.rank, job.size, 20.0), []
    memory, waiter = pg._local.engine.transport, pg._local.engine.waiter
    for owner, name, entry in ((memory, "fence", "release"), (waiter, "_fence", "full"), (waiter, "publish", "store")):
        setattr(owner, name, logged(log, entry, getattr(owner, name)))
    return pg, log


@on_ranks(3, limit_s=120, env={knobs.ONE_PASS_BYTES_ENV_VAR: "0"})
def test_a_share_of_a_prepared_call_is_announced_behind_a_fence(job: Job) -> None:
    """torch's kernels write it; the copy of the input before it has its own. The first call is not prepared."""
    pg, log = with_log(job)
    CALLS["all_reduce_small"](pg).wait()
    log.clear()
    CALLS["all_reduce_small"](pg).wait()
    assert [entry for entry in log if entry != "full"] == ["store", "release", "store"]


@on_ranks(2, limit_s=120, env=SMALL_CHUNKS)
def test_every_counter_is_stored_and_read_behind_its_fence(job: Job) -> None:
    """A fence is between data and the counter that announces it, and between the counter and the check for sleepers."""
    pg, log = with_log(job)
    pg._local.engine.observer = lambda action, chunk: log.append(action.name)
    CALLS["all_reduce"](pg).wait()
    stores = [number for number, entry in enumerate(log) if entry == "store"]
    assert len(stores) >= 3
    for number in stores:
        assert log[number - 2 : number + 2] == ["PUBLISH", "release", "store", "full"]
