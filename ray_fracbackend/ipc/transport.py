"""The seam between the slot protocol and a kind of memory. Imports torch.

Counters, descriptions and failure marks always live in shared host memory; a transport provides the memory that
tensors pass through, and the order of accesses to it. Host memory orders by CPU fences. Device memory would record
an interprocess event in `record` and make its stream wait for the peer's event in `wait`: the engine calls `wait` only
after it has seen the peer's counter reach the step, that is after the peer's `record`, and the slot protocol never
records event ``s + 2`` before all ranks have waited for ``s``, so a ring of two events per rank is enough.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Transport(Protocol):
    """Memory of one group in one place.

    Attributes:
        chunk_bytes: Size of a slot in bytes; a multiple of 4096.
        num_ranks: Local ranks.
    """

    chunk_bytes: int
    num_ranks: int

    def slots(self, step: int, dtype: torch.dtype, start: int, end: int) -> list[torch.Tensor]:
        """Elements `start` to `end` of the slot that each rank fills in `step`.

        Returns:
            One 1-D view of `dtype` per local rank; the whole slot is `chunk_bytes` long. The transport owns them.
        """
        ...

    def folded(self, step: int, dtype: torch.dtype, start: int, end: int) -> list[torch.Tensor]:
        """As `slots`, of the memory for the share that each rank reduces in `step`.

        It is at least ``chunk_bytes / num_ranks`` long.
        """
        ...

    def record(self, step: int) -> None:
        """Order this rank's accesses so far before its counter shows `step`."""
        ...

    def wait(self, rank: int, step: int) -> None:
        """Order this rank's further accesses after those that `rank` recorded for `step`, whose counter was seen."""
        ...

    def close(self) -> None:
        """Give the memory up. May be called again."""
        ...
