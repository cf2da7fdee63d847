"""One or two ranks fail by themselves in one step of a start: all ranks end within seconds, and the error names these ranks alone."""

from __future__ import annotations

import time

import pytest

from ray_fracbackend import FracBackendError
from tests.ray.starts import initialized, replace_in_worker, start

_PROCESS_GROUP = "ray_fracbackend.worker.process_group"
STEPS = {
    "probe": ("ray_fracbackend.worker.probe", "probe_devices"),
    "store": (_PROCESS_GROUP, "_prepare"),
    "connect": ("ray_fracbackend.worker.store", "connect_store"),
    "create": ("torch.distributed", "init_process_group"),
    "verify": (_PROCESS_GROUP, "verify_process_group"),
}
FULL = pytest.mark.full
# Far below the limit that a rank would reach if it waited for the failed one.
_START_TIMEOUT_S, _WITHIN_S = 100.0, 30.0


def failure_of(group, step, ranks):
    """Return the error of a start in which these ranks fail at this step, and its seconds."""
    for rank in ranks:
        group.execute_single(rank, replace_in_worker, *STEPS[step], "raise", 1)
    started = time.monotonic()
    with pytest.raises(FracBackendError) as caught:
        start(group, start_timeout_s=_START_TIMEOUT_S)
    return caught.value, time.monotonic() - started


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "ranks", [(0,), pytest.param((1,), marks=FULL), (2,), pytest.param((0, 2), marks=FULL)], ids=str
)
def test_the_failed_ranks_are_named(three_workers, step, ranks):
    """With the library's message and nobody else; the others are free for the next start, which succeeds."""
    error, seconds = failure_of(three_workers, step, ranks)
    assert error.ranks == ranks, error
    assert "the disk is on fire" in str(error)
    assert [rank for rank in range(3) if rank not in ranks and f"rank {rank} (" in str(error)] == [], error
    assert "Search for the fault" not in str(error)
    assert seconds < _WITHIN_S
    assert three_workers.execute(initialized) == [False] * 3
