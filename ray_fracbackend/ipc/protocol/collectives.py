"""Protocols of collectives on flat tensors, independent of memory and network. Imports torch."""

from __future__ import annotations

from typing import Protocol

import torch

from .description import Terms
from .local import Parts, SomeParts
from .reductions import Reduction


class Collectives(Protocol):
    """Collectives of one group on 1-D contiguous tensors of one device type; see `local.LocalCollectives`.

    Only one call may run at a time. Any failure raises an `IpcError`; the group cannot be used afterwards.
    """

    rank: int
    num_ranks: int

    def barrier(self, terms: Terms) -> None:
        """Return once every rank has called this."""

    def reduce(self, tensor: torch.Tensor, root: int | None, reduction: Reduction, terms: Terms) -> None:
        """Reduce into the root's `tensor`, or into every rank's if root is None; other ranks' tensors are unchanged."""

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> None:
        """Copy the root's `tensor` into every rank's `tensor`."""

    def gather(self, tensor: torch.Tensor, outputs: Parts | None, root: int | None, terms: Terms) -> None:
        """Copy every rank's `tensor` into the root's ``outputs[rank]``; all have the same size."""

    def reduce_scatter(self, inputs: Parts, output: torch.Tensor, reduction: Reduction, terms: Terms) -> None:
        """Reduce ``inputs[r]`` of all ranks into rank r's `output`; all have the same size."""

    def exchange(self, inputs: SomeParts, outputs: SomeParts, max_bytes: int, terms: Terms) -> None:
        """Copy ``inputs[r]`` of this rank into ``outputs[this rank]`` of rank r."""


class HostCollectives(Collectives, Protocol):
    """Collectives of CPU tensors, which also report failures and close the group."""

    def raise_if_unusable(self, what: str) -> None:
        """Raise the error that a call named `what` would raise now, if the group is closed or broken."""

    def fail(self, reason: str) -> None:
        """Mark the group as broken: every rank raises with `reason`, or with an earlier one."""

    def abort(self, reason: str) -> None:
        """Mark the group as broken, then close it. May be called repeatedly and from any thread."""

    def close(self, idle: bool) -> None:
        """Leave the group; `idle` means that no call is in progress. May be called repeatedly."""
