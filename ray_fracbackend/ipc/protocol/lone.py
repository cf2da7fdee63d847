"""Collectives of a group with a single rank, which already has all data. Imports torch."""

from __future__ import annotations

import torch

from .description import Terms
from .local import Parts, SomeParts, as_bytes, overlaps_shifted
from .reductions import Reduction


class LoneCollectives:
    """Collectives of one rank, on any device; for the arguments see `LocalCollectives`. Allocates no shared memory."""

    rank = 0
    num_ranks = 1

    def barrier(self, terms: Terms) -> None:
        """Return at once."""

    def reduce(self, tensor: torch.Tensor, root: int | None, reduction: Reduction, terms: Terms) -> None:
        """Leave `tensor` unchanged: it is the sum, mean, product, ... of one rank."""

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> None:
        """Leave `tensor` unchanged."""

    def gather(self, tensor: torch.Tensor, outputs: Parts | None, root: int | None, terms: Terms) -> None:
        """Copy `tensor` into the only output."""
        assert outputs is not None
        _copy(tensor, outputs[0])

    def reduce_scatter(self, inputs: Parts, output: torch.Tensor, reduction: Reduction, terms: Terms) -> None:
        """Copy the only input into `output`."""
        _copy(inputs[0], output)

    def exchange(self, inputs: SomeParts, outputs: SomeParts, max_bytes: int, terms: Terms) -> None:
        """Copy the only input into the only output."""
        assert inputs[0] is not None
        assert outputs[0] is not None
        _copy(inputs[0], outputs[0])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    data, place = as_bytes(source), as_bytes(target)
    if data.data_ptr() != place.data_ptr():
        place.copy_(data.clone() if overlaps_shifted(data, [place]) else data)
