"""Every collective, element type, reduce operation, shape and world size against a reference and against Gloo.

By default every pair of them, with --full every combination.
"""

from __future__ import annotations

import itertools

import ipc_reference as ref
import pytest
import torch
import torch.distributed as dist
from ipc_calls import bare_group, options
from ipc_harness import Job, run_ranks, values
from ipc_table import SMALL_CHUNKS, Case, cases_of, pairwise, whole_table

WORLD_SIZES = [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.full)]


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_every_collective_matches_reference_and_gloo(size: int, full: bool) -> None:
    """The table gives the exact reference result on every rank, and Gloo agrees where it can."""
    for failures in values(run_ranks(whole_table, size, ref.ALL_DTYPES, full, limit_s=120, env=SMALL_CHUNKS)):
        assert failures == []


# One letter a rank: its host. Interleaved and uneven on purpose.
@pytest.mark.parametrize("hosts", ["aab", "abba", "abacb"])
def test_every_collective_is_right_between_hosts(hosts: str, full: bool) -> None:
    """Ranks on several hosts, uneven and interleaved, get the exact reference results too."""
    dtypes = [torch.float32, torch.bfloat16, torch.uint16, torch.bool]

    def env(rank: int) -> dict[str, str]:
        return {**SMALL_CHUNKS, "RAY_FRACBACKEND_IPC_HOST": hosts[rank]}

    for failures in values(run_ranks(whole_table, len(hosts), dtypes, full, limit_s=120, env=env)):
        assert failures == []


def test_pairs_of_the_table() -> None:
    """The default table has every pair of values of the full one, and is far smaller."""
    cases = cases_of(2, ref.ALL_DTYPES)
    kept = pairwise(cases, 2)

    def pairs(table: list[Case]) -> set[tuple[object, ...]]:
        return {pair for case in table for pair in itertools.combinations(enumerate(case[:-1]), 2)}

    assert pairs(kept) == pairs(cases)
    assert len(kept) * 5 < len(cases)


def aliased(job: Job, numel: int) -> list[str]:
    """Calls whose input lies inside the output, or is it; returns those whose result differs from a call on copies."""
    job.init()
    rank, size, wrong = job.rank, job.size, []
    own = torch.arange(numel, dtype=torch.float32) + 1e6 * rank
    gathered, exchanged, reduced = torch.empty(size * numel), torch.empty(numel), torch.empty(numel // size)
    dist.all_gather_into_tensor(gathered, own)
    dist.all_to_all_single(exchanged, own)
    dist.reduce_scatter_tensor(reduced, own)
    for shift in range(size):
        parts = list(torch.zeros(size, numel))
        parts[(rank + shift) % size].copy_(own)
        dist.all_gather(parts, parts[(rank + shift) % size])
        if not torch.equal(torch.cat(parts), gathered):
            wrong.append(f"all_gather from part {shift} after its own")
    both = own.clone()
    dist.all_to_all_single(both, both)
    if not torch.equal(both, exchanged):
        wrong.append("all_to_all_single in place")
    for shift in range(size):
        parts = list(own.clone().view(size, -1))
        dist.reduce_scatter(parts[(rank + shift) % size], parts)
        if not torch.equal(parts[(rank + shift) % size], reduced):
            wrong.append(f"reduce_scatter into part {shift} after its own")
    # Not from the first byte of a part on: chunks of the one lie across chunks of the other.
    memory = torch.zeros((size + 1) * numel)
    memory[numel // 2 : numel // 2 + numel].copy_(own)
    dist.all_gather_into_tensor(memory[: size * numel], memory[numel // 2 : numel // 2 + numel])
    if not torch.equal(memory[: size * numel], gathered):
        wrong.append("all_gather across its parts")
    memory = torch.cat([own, own])
    dist.reduce_scatter_tensor(memory[numel // (2 * size) :][: numel // size], memory[:numel])
    if not torch.equal(memory[numel // (2 * size) :][: numel // size], reduced):
        wrong.append("reduce_scatter across its parts")
    parts = list(own.clone().view(size, -1))
    dist.all_to_all(parts[::-1], parts)
    if not torch.equal(torch.cat(parts[::-1]), exchanged):
        wrong.append("all_to_all in place, in another order")
    splits = [numel // 4 * (1 + rank % 2) if r == 0 else 0 for r in range(size)]
    splits[-1] = numel - sum(splits[:-1])
    theirs = torch.tensor(splits)
    dist.all_to_all_single(received := torch.empty(size, dtype=torch.int64), theirs)
    expected = torch.empty(int(received.sum()))
    dist.all_to_all_single(expected, own, received.tolist(), splits)
    memory = torch.zeros(size * numel)
    memory[:numel].copy_(own)
    dist.all_to_all_single(memory[: len(expected)], memory[:numel], received.tolist(), splits)
    if not torch.equal(memory[: len(expected)], expected):
        wrong.append("all_to_all_single in place, in unequal parts")
    return wrong


@pytest.mark.parametrize("numel", [12, 120_000])
@pytest.mark.parametrize("size", [2, 3])
def test_input_and_output_may_share_memory(size: int, numel: int) -> None:
    """Whichever part of one the other is, in one chunk and in many."""
    assert values(run_ranks(aliased, size, numel, env=SMALL_CHUNKS)) == [[]] * size


def lists_of_no_root(job: Job) -> list[list[list[float]]]:
    """What is in the lists that a rank passes to a gather of which it is not the root, and in the root's."""
    pg = bare_group(job, "lists", job.rank, job.size, 20.0)
    targets = [torch.full((2, 3), float(job.rank + 7)).t() for _ in range(job.size)]
    pg.gather([targets], [torch.full((3, 2), float(job.rank))], options("Gather")).wait()
    return [target.tolist() for target in targets]


def test_lists_of_a_rank_that_is_not_the_root_stay() -> None:
    """Whatever their layout, nothing is written to them."""
    root, other = values(run_ranks(lists_of_no_root, 2, limit_s=60))
    assert root == [[[0.0] * 2] * 3, [[1.0] * 2] * 3]
    assert other == [[[8.0] * 2] * 3] * 2
