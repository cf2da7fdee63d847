"""The memory that tensors pass through: slots and folded areas of all ranks of a host. Imports torch.

Counters, descriptions and failure marks are on the control page, which is always in host memory. This is the memory for the
tensors, and the order of accesses to it. Host memory is ordered by CPU fences alone. `device.memory` also records an
interprocess event in `record` and makes its stream wait for the peer's event in `wait`: the engine calls `wait` only after it
has seen the peer's counter reach the step, that is after the peer's `record`, and the slot protocol never records event
``s + 2`` before all ranks have waited for ``s``, so a ring of two events per rank is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .atomics import make_fences

_ALIGNMENT_BYTES = 4096
_MAX_VIEWS = 2048


def share_bytes(chunk_bytes: int, num_ranks: int) -> int:
    """Return the bytes of one rank's share of a chunk, rounded up so that every dtype and page boundary fits."""
    share = -(-chunk_bytes // num_ranks) + 64
    return -(-share // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def block_bytes(chunk_bytes: int, folded_bytes: int) -> int:
    """Return the bytes of one rank's block.

    Args:
        chunk_bytes: Size of a slot in bytes.
        folded_bytes: Size of a folded area in bytes.
    """
    return 2 * (chunk_bytes + folded_bytes)


class SlotMemory:
    """Slots and folded areas of one group on one host.

    Args:
        chunk_bytes: Size of a slot in bytes; a multiple of 4096.
        blocks: One block for each local rank, 1-D uint8, mapped by the caller: ``slot of even steps | slot of odd steps |
            folded (even) | folded (odd)``.

    Attributes:
        chunk_bytes: As given.
    """

    def __init__(self, chunk_bytes: int, blocks: Sequence[torch.Tensor]) -> None:
        self.chunk_bytes = chunk_bytes
        self._release_fence, self._acquire_fence, _ = make_fences()
        # By parity of the step, then by local rank.
        self._slots = [[block[parity * chunk_bytes :][:chunk_bytes] for block in blocks] for parity in (0, 1)]
        areas = [block[2 * chunk_bytes :] for block in blocks]
        self._folded = [[area.chunk(2)[parity] for area in areas] for parity in (0, 1)]
        # Views are kept, because making them costs more than a small collective has to spare.
        self._views: dict[tuple[bool, int, torch.dtype, int, int], list[torch.Tensor]] = {}

    def slots(self, step: int, dtype: torch.dtype, start: int, end: int) -> list[torch.Tensor]:
        """Return elements `start` to `end` of the slot that each rank fills in `step`.

        Returns:
            One 1-D view of `dtype` per local rank; the whole slot is `chunk_bytes` long. This object owns the memory.
        """
        key = (False, step & 1, dtype, start, end)
        return self._views.get(key) or self._make_views(key, self._slots)

    def folded(self, step: int, dtype: torch.dtype, start: int, end: int) -> list[torch.Tensor]:
        """Return the same of the memory for the share that each rank reduces in `step`.

        It is as long as `local.ReductionPlan.folded_bytes` says.
        """
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

    def record(self, step: int) -> None:
        """Order this rank's accesses so far before its counter shows `step`."""
        self._release_fence()

    def wait(self, rank: int, step: int) -> None:
        """Order this rank's further accesses after those that `rank` recorded for `step`, whose counter was seen."""
        self._acquire_fence()

    def close(self) -> None:
        """Drop all views of the memory. May be called again."""
        self._slots, self._folded = [], []
        self._views = {}
