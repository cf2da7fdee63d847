"""Longer workloads for ranks, on any device, and calls whose tensors share memory."""

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


def aliased(job: Job, numel: int) -> None:
    """Run calls whose input is inside the output, or equal to it; compare their results with those of calls on copies."""
    job.init()
    rank, size = job.rank, job.size
    own = torch.arange(numel, dtype=torch.float32) + 1e6 * rank
    gathered, exchanged, reduced = torch.empty(size * numel), torch.empty(numel), torch.empty(numel // size)
    dist.all_gather_into_tensor(gathered, own)
    dist.all_to_all_single(exchanged, own)
    dist.reduce_scatter_tensor(reduced, own)
    for shift in range(size):
        parts = list(torch.zeros(size, numel))
        parts[(rank + shift) % size].copy_(own)
        dist.all_gather(parts, parts[(rank + shift) % size])
        assert torch.equal(torch.cat(parts), gathered), f"all_gather from part {shift} after its own"
    both = own.clone()
    dist.all_to_all_single(both, both)
    assert torch.equal(both, exchanged), "all_to_all_single in place"
    for shift in range(size):
        parts = list(own.clone().view(size, -1))
        dist.reduce_scatter(parts[(rank + shift) % size], parts)
        assert torch.equal(parts[(rank + shift) % size], reduced), f"reduce_scatter into part {shift} after its own"
    # Not from the first byte of a part on: chunks of one cross chunks of the other.
    memory = torch.zeros((size + 1) * numel)
    memory[numel // 2 : numel // 2 + numel].copy_(own)
    dist.all_gather_into_tensor(memory[: size * numel], memory[numel // 2 : numel // 2 + numel])
    assert torch.equal(memory[: size * numel], gathered), "all_gather across its parts"
    memory = torch.cat([own, own])
    dist.reduce_scatter_tensor(memory[numel // (2 * size) :][: numel // size], memory[:numel])
    assert torch.equal(memory[numel // (2 * size) :][: numel // size], reduced), "reduce_scatter across its parts"
    parts = list(own.clone().view(size, -1))
    dist.all_to_all(parts[::-1], parts)
    assert torch.equal(torch.cat(parts[::-1]), exchanged), "all_to_all in place, in another order"
    splits = [numel // 4 * (1 + rank % 2) if r == 0 else 0 for r in range(size)]
    splits[-1] = numel - sum(splits[:-1])
    theirs = torch.tensor(splits)
    dist.all_to_all_single(received := torch.empty(size, dtype=torch.int64), theirs)
    expected = torch.empty(int(received.sum()))
    dist.all_to_all_single(expected, own, received.tolist(), splits)
    memory = torch.zeros(size * numel)
    memory[:numel].copy_(own)
    dist.all_to_all_single(memory[: len(expected)], memory[:numel], received.tolist(), splits)
    assert torch.equal(memory[: len(expected)], expected), "all_to_all_single in place, in unequal parts"
