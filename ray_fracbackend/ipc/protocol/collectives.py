"""What carries the flat tensors of a process group, whichever memory or network that is. Imports torch."""

from __future__ import annotations

from typing import Protocol

import torch

from .description import Terms
from .local import Parts, SomeParts
from .reductions import Reduction


class Collectives(Protocol):
    """Collectives of one group on 1-D contiguous tensors of one kind of device, as `local.LocalCollectives` documents them.

    One call at a time. Any failure raises an `IpcError` after which the group cannot be used any more.
    """

    rank: int
    num_ranks: int

    def barrier(self, terms: Terms) -> None:
        """Return once every rank has called this."""

    def reduce(self, tensor: torch.Tensor, root: int | None, reduction: Reduction, terms: Terms) -> None:
        """Reduce into the root's `tensor`, or into all where root is None; others keep theirs."""

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> None:
        """Copy the root's `tensor` into that of every rank."""

    def gather(self, tensor: torch.Tensor, outputs: Parts | None, root: int | None, terms: Terms) -> None:
        """Copy every rank's `tensor` into the root's ``outputs[rank]``; sizes are equal."""

    def reduce_scatter(self, inputs: Parts, output: torch.Tensor, reduction: Reduction, terms: Terms) -> None:
        """Reduce ``inputs[r]`` of all ranks into rank r's `output`; sizes are equal."""

    def exchange(self, inputs: SomeParts, outputs: SomeParts, max_bytes: int, terms: Terms) -> None:
        """Copy ``inputs[r]`` of this rank into ``outputs[this rank]`` of rank r."""


class HostCollectives(Collectives, Protocol):
    """Collectives of CPU tensors, with which a group begins and ends."""

    def raise_if_unusable(self, what: str) -> None:
        """Raise what a call named `what` would raise if this rank began it now."""

    def fail(self, reason: str) -> None:
        """Break the group: every rank raises, unless another reason came first."""

    def abort(self, reason: str) -> None:
        """Break the group, then close it. May be called again, from any thread."""

    def close(self, idle: bool) -> None:
        """Leave the group; `idle` says that no call is in progress. May be called again."""
