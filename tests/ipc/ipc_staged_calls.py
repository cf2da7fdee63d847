"""Staged collectives on the fake device, each as one call on a process group, and the points where they can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipc_calls import bare_group
from ipc_device_calls import CALLS
from ipc_harness import Job

from ray_fracbackend.ipc.device import staged

# A step of a call, and its earlier occurrences in this call.
Point = tuple[str, int]
# Minimum for the tensors of `CALLS` and chunks of 64 KiB.
_NUM_CHUNKS = 5


def staged_group(job: Job, name: str, rank: int, size: int, timeout_s: float, ranks: tuple[int, ...] = ()) -> Any:
    """Create a process group that has staged a tensor."""
    pg = bare_group(job, name, rank, size, timeout_s, ranks)
    CALLS["all_reduce_small"](pg).wait()
    assert isinstance(pg._device_side._collectives, staged.StagedCollectives)
    return pg


def points(name: str, num_ranks: int = 0) -> list[Point]:
    """Return steps at which a fault can occur: a copy to the host is awaited, the host's part begins, and has ended."""
    if name == "barrier":
        return [("begin", 0), ("end", 0)]
    chunks = [0] if name.endswith("small") else range(_NUM_CHUNKS)
    return [(step, chunk) for chunk in chunks for step in ("copy", "begin", "end")]


def strike_at(pg: Any, point: Point, strike: Callable[[], None]) -> None:
    """Call `strike` when this rank reaches the given occurrence of a step of its next calls."""
    seen: dict[str, int] = {}

    def come(step: str) -> None:
        seen[step] = seen.get(step, -1) + 1
        if (step, seen[step]) == point:
            strike()

    carrier, wait_for = pg._device_side._collectives, staged._wait_for
    carrier._host = _Observed(carrier._host, come)

    def observed_wait(event: Any, terms: Any) -> None:
        come("copy")
        wait_for(event, terms)

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
