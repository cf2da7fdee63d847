"""The seam between the slot protocol and a kind of memory. Imports torch.

Counters, descriptions and failure marks always live in shared host memory; a transport provides the memory that
tensors pass through, and the order of accesses to it. Host memory orders by CPU fences. Device memory records an
interprocess event in `record` and makes its stream wait for the peer's event in `wait`: the engine calls `wait` only
after it has seen the peer's counter reach the step, that is after the peer's `record`, and the slot protocol never
records event ``s + 2`` before all ranks have waited for ``s``, so a ring of two events per rank is enough.
"""

from __future__ import annotations

from typing import Protocol

import torch

_MAX_VIEWS = 2048


class Transport(Protocol):
    """Memory of one group on one host, or on one of its devices.

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

        It is at least ``chunk_bytes / num_ranks`` long, and ``chunk_bytes`` where one rank reduces for all.
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


class SlotMemory:
    """The views of a transport, over memory that is already mapped.

    Args:
        chunk_bytes: Size of a slot in bytes.
        slots: Slots by parity of the step, then by local rank; 1-D uint8.
        folded: Folded memory in the same order.
    """

    def __init__(self, chunk_bytes: int, slots: list[list[torch.Tensor]], folded: list[list[torch.Tensor]]) -> None:
        self.chunk_bytes = chunk_bytes
        self.num_ranks = len(slots[0])
        self._slots = slots
        self._folded = folded
        # Views are kept, because making them costs more than a small collective has to spare.
        self._views: dict[tuple[bool, int, torch.dtype, int, int], list[torch.Tensor]] = {}

    def slots(self, step: int, dtype: torch.dtype, start: int, end: int) -> list[torch.Tensor]:
        """See `Transport.slots`."""
        key = (False, step & 1, dtype, start, end)
        return self._views.get(key) or self._make_views(key, self._slots)

    def folded(self, step: int, dtype: torch.dtype, start: int, end: int) -> list[torch.Tensor]:
        """See `Transport.folded`."""
        key = (True, step & 1, dtype, start, end)
        return self._views.get(key) or self._make_views(key, self._folded)

    def _make_views(
        self, key: tuple[bool, int, torch.dtype, int, int], memory: list[list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        _, parity, dtype, start, end = key
        with torch.inference_mode(False):
            views = [tensor.view(dtype)[start:end] for tensor in memory[parity]]
        self._views[key] = views
        return views

    def close(self) -> None:
        """See `Transport.close`."""
        self._slots, self._folded = [], []
        self._views = {}
