"""Every collective, element type, reduce operation, shape and world size against a reference and against Gloo.

By default every pair of them, with --full every combination.
"""

from __future__ import annotations

import itertools

import ipc_reference as ref
import pytest
import torch
from ipc_harness import run_ranks, values
from ipc_table import SMALL_CHUNKS, Case, cases_of, pairwise, whole_table

WORLD_SIZES = [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.full)]


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_every_collective_matches_reference_and_gloo(size: int, full: bool) -> None:
    """The table gives the exact reference result on every rank, and Gloo agrees where it can."""
    for failures in values(run_ranks(whole_table, size, ref.ALL_DTYPES, full, limit_s=120, env=SMALL_CHUNKS)):
        assert failures == []


# One letter a rank: its place. Interleaved and uneven on purpose.
@pytest.mark.parametrize("places", ["aab", "abba", "abacb"])
def test_every_collective_is_right_between_places(places: str, full: bool) -> None:
    """Ranks in several places, uneven and interleaved, get the exact reference results too."""
    dtypes = [torch.float32, torch.bfloat16, torch.uint16, torch.bool]

    def env(rank: int) -> dict[str, str]:
        return {**SMALL_CHUNKS, "RAY_FRACBACKEND_IPC_PLACE": places[rank]}

    for failures in values(run_ranks(whole_table, len(places), dtypes, full, limit_s=120, env=env)):
        assert failures == []


def test_pairs_of_the_table() -> None:
    """The default table has every pair of values of the full one, and is far smaller."""
    cases = cases_of(2, ref.ALL_DTYPES)
    kept = pairwise(cases, 2)

    def pairs(table: list[Case]) -> set[tuple[object, ...]]:
        return {pair for case in table for pair in itertools.combinations(enumerate(case[:-1]), 2)}

    assert pairs(kept) == pairs(cases)
    assert len(kept) * 5 < len(cases)
