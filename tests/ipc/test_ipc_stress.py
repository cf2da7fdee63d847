"""Long runs: exact results and flat memory over many collectives, groups and pauses."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ipc_harness import Job, run_ranks, values

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)


def resident_bytes() -> int:
    """Return this process's own memory (not shared)."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def many_collectives(job: Job, num_small: int, num_large: int, large_numel: int) -> tuple[int, int]:
    """Run small and large collectives on two interleaved groups; return wrong results and growth in bytes."""
    job.init()
    groups = [dist.new_group(), dist.new_group()]
    shared, own = random.Random(1), random.Random(f"own {job.rank}")
    rank_sum = sum(range(1, job.size + 1))
    large = torch.empty(large_numel)
    wrong, base = 0, 0
    every = max(1, num_small // num_large)
    pending: list[tuple[dist.Work, torch.Tensor, float]] = []
    for number in range(num_small):
        if number == num_small // 5:
            base = resident_bytes()
        group, value = groups[shared.randrange(2)], float(shared.randrange(1, 100))
        small = torch.full((shared.randrange(1, 2000),), value * (job.rank + 1))
        if shared.random() < 0.2:
            pending.append((dist.all_reduce(small, group=group, async_op=True), small, value * rank_sum))
        else:
            dist.all_reduce(small, group=group)
            wrong += not bool((small == value * rank_sum).all())
        if len(pending) > 8:
            for work, tensor, expected in pending:
                work.wait()
                wrong += not bool((tensor == expected).all())
            pending.clear()
        if number % every == 0:
            large.fill_(value * (job.rank + 1))
            dist.all_reduce(large, group=groups[number // every % 2])
            wrong += not bool((large == value * rank_sum).all())
        if own.random() < 0.001:
            time.sleep(own.random() * 0.01)
    for work, tensor, expected in pending:
        work.wait()
        wrong += not bool((tensor == expected).all())
    dist.barrier()
    return wrong, resident_bytes() - base


def check(size: int, num_small: int, num_large: int, large_numel: int, limit_s: float) -> None:
    """Run and check a number of collectives."""
    for wrong, growth in values(run_ranks(many_collectives, size, num_small, num_large, large_numel, limit_s=limit_s)):
        assert wrong == 0
        assert growth < 8 << 20


@pytest.mark.full
def test_some_thousand_collectives_are_exact_and_leak_no_memory() -> None:
    """The short form of the long run below, for every change."""
    check(2, 3000, 30, 1_000_003, 60)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_a_hundred_thousand_collectives_are_exact_and_leak_no_memory(size: int) -> None:
    """100,000 small and 1,000 large collectives on two groups with random pauses."""
    check(size, 100_000, 1000, 4_000_003, 550)
