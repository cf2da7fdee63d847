"""Longer workloads for ranks, on any device."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from ipc_harness import Job, rank_device

import ray_fracbackend.staged  # noqa: F401 (registers both backends)


def busy(job: Job, num_calls: int) -> None:
    """Run overlapping all-reduces of random sizes on two groups in random order, and check the results."""
    job.init()
    overlap(job, [dist.new_group(), dist.new_group()], num_calls, (1, 500, 20_000, 40_000))


def overlap(job: Job, groups: list[dist.ProcessGroup], num_calls: int, sizes: Sequence[int]) -> None:
    """As `busy`, on these groups."""
    shared, own, pending = random.Random(5), random.Random(job.rank), []
    for number in range(num_calls):
        tensor = torch.full((shared.choice(sizes),), float(number % 97 * (job.rank + 1)), device=rank_device())
        expected = number % 97 * job.size * (job.size + 1) / 2
        pending.append((dist.all_reduce(tensor, group=groups[shared.randrange(2)], async_op=True), tensor, expected))
        if own.random() < 0.05:
            time.sleep(own.random() * 0.005)
        if len(pending) > 10:
            for work, result, value in pending:
                work.wait()
                assert bool((result == value).all())
            pending.clear()
    dist.barrier()
