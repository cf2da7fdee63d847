"""Every collective, element type, reduce operation, shape and world size compared with a reference and with Gloo.

By default every pair of them, with --full every combination.
"""

from __future__ import annotations

import itertools

import ipc_reference as ref
import pytest
import torch
from ipc_calls import bare_group, options
from ipc_harness import Job, on_ranks, run_ranks, values
from ipc_table import SMALL_CHUNKS, Case, cases_of, check_table, pairwise
from ipc_workloads import aliased

WORLD_SIZES = [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3, 4, 7))]


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_every_collective_matches_reference_and_gloo(size: int, full: bool) -> None:
    """The table has the exact reference results on every rank, and Gloo agrees if it supports the case."""
    check_table(size, ref.ALL_DTYPES, full, SMALL_CHUNKS)


def test_pairs_of_the_table() -> None:
    """The default table contains every pair of values of the full one, and is much smaller."""
    cases = cases_of(2, ref.ALL_DTYPES)
    kept = pairwise(cases, 2)

    def pairs(table: list[Case]) -> set[tuple[object, ...]]:
        return {pair for case in table for pair in itertools.combinations(enumerate(case[:-1]), 2)}

    assert pairs(kept) == pairs(cases)
    assert len(kept) * 5 < len(cases)


@pytest.mark.parametrize("numel", [12, 120_000])
@pytest.mark.parametrize("size", [2, 3])
def test_input_and_output_may_share_memory(size: int, numel: int) -> None:
    """Either may be part of the other, in one chunk and in several."""
    values(run_ranks(aliased, size, numel, env=SMALL_CHUNKS))


@on_ranks(2)
def test_lists_of_a_rank_that_is_not_the_root_stay(job: Job) -> None:
    """Whatever their layout, nothing is written to them."""
    pg = bare_group(job, "lists", job.rank, job.size, 20.0)
    targets = [torch.full((2, 3), float(job.rank + 7)).t() for _ in range(job.size)]
    pg.gather([targets], [torch.full((3, 2), float(job.rank))], options("Gather")).wait()
    expected = [8.0, 8.0] if job.rank else [0.0, 1.0]
    assert [target.tolist() for target in targets] == [[[value] * 2] * 3 for value in expected]
