"""Compute how many workers with a fraction of a GPU fit on one GPU. Standard library only."""

from __future__ import annotations

import math

# Ray counts resources in ten-thousandths.
RESOURCE_UNIT = 1e-4


def workers_per_gpu(fraction: float) -> int:
    """Return how many workers with this fraction, above 0 and below 1, fit on one GPU."""
    return math.floor((1 + RESOURCE_UNIT / 2) / fraction)
