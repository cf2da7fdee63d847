"""Every collective, element type, reduce operation, shape and world size against a reference and against Gloo."""

from __future__ import annotations

import ipc_reference as ref
import pytest
import torch
from ipc_harness import run_ranks, values
from ipc_table import SMALL_CHUNKS, whole_table

WORLD_SIZES = [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_every_collective_matches_reference_and_gloo(size: int) -> None:
    """The whole table gives the exact reference result on every rank, and Gloo agrees where it can."""
    for failures in values(run_ranks(whole_table, size, ref.ALL_DTYPES, limit_s=120, env=SMALL_CHUNKS)):
        assert failures == []


# One letter a rank: its place. Interleaved and uneven on purpose.
@pytest.mark.parametrize("places", ["aab", "abba", "abacb"])
def test_every_collective_is_right_between_places(places: str) -> None:
    """Ranks in several places, uneven and interleaved, get the exact reference results too."""
    dtypes = [torch.float32, torch.bfloat16, torch.uint16, torch.bool]

    def env(rank: int) -> dict[str, str]:
        return {**SMALL_CHUNKS, "RAY_FRACBACKEND_IPC_PLACE": places[rank]}

    for failures in values(run_ranks(whole_table, len(places), dtypes, limit_s=120, env=env)):
        assert failures == []
