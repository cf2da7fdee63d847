"""Functions for a worker process in the runs under faults: start, train, stop, and return what it still holds."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.worker.group_end import end_process_group
from ray_fracbackend.worker.process_group import start_worker
from tests.soak.belongings import belongings

# The variables of a successful start stay for the train function, until the next start.
_KEPT = ("rss_bytes", "children", "variables")


def start(instruction: WorkerPlan) -> None:
    """Run our start; a failed one must leave the environment unchanged."""
    before = dict(os.environ)
    try:
        start_worker(instruction)
    except BaseException:
        assert dict(os.environ) == before, "the failed start left variables behind"
        assert not dist.is_initialized(), "the failed start left a process group behind"
        raise


def train(num_steps: int, pause_s: float) -> None:
    """Run collectives with known results: sums of a small and a large tensor, and all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(num_steps):
        numbers = torch.full((300_000 if step % 8 == 0 else 512,), float(rank + step))
        dist.all_reduce(numbers)
        expected = size * (size - 1) / 2 + size * step
        assert bool((numbers == expected).all()), f"all_reduce is wrong in step {step}"
        gathered = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(gathered, torch.full((1,), float(rank)))
        assert [each.item() for each in gathered] == list(range(size)), f"all_gather is wrong in step {step}"
        time.sleep(pause_s)


def stop() -> None:
    """Do the same as Ray Train's shutdown, also after a failure."""
    end_process_group()


def held() -> dict[str, Any]:
    """Return what a process without a group still holds."""
    return {name: number for name, number in belongings().items() if name not in _KEPT}
