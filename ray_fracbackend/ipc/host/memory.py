"""Transport through shared host memory. Runs in every rank; imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .arena import Arena
from .transport import SlotMemory

_ALIGNMENT_BYTES = 4096


def folded_bytes(chunk_bytes: int, num_ranks: int) -> int:
    """Bytes of one share of a chunk, rounded up so that every dtype and page boundary fits."""
    share = -(-chunk_bytes // num_ranks) + 64
    return -(-share // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def data_bytes(chunk_bytes: int, num_ranks: int) -> int:
    """Bytes that slots and folded memory of all local ranks take."""
    return num_ranks * 2 * (chunk_bytes + folded_bytes(chunk_bytes, num_ranks))


class HostMemory(SlotMemory):
    """Slots in a shared mapping; see `transport.Transport`.

    Args:
        arena: The mapping.
        offset: Byte at which the data begins.
        chunk_bytes: Size of a slot in bytes.
        num_ranks: Local ranks.
        release_fence: Makes this CPU's stores visible before later ones.
        acquire_fence: Keeps this CPU's later loads after earlier ones.
    """

    def __init__(
        self,
        arena: Arena,
        offset: int,
        chunk_bytes: int,
        num_ranks: int,
        release_fence: Callable[[], None],
        acquire_fence: Callable[[], None],
    ) -> None:
        self._release_fence = release_fence
        self._acquire_fence = acquire_fence
        whole = torch.frombuffer(arena.memory, dtype=torch.uint8)[offset:]
        share = folded_bytes(chunk_bytes, num_ranks)
        stride = 2 * (chunk_bytes + share)
        ranks = range(num_ranks)
        first = 2 * chunk_bytes
        slots = [[whole[r * stride + p * chunk_bytes :][:chunk_bytes] for r in ranks] for p in (0, 1)]
        folded = [[whole[r * stride + first + p * share :][:share] for r in ranks] for p in (0, 1)]
        super().__init__(chunk_bytes, slots, folded)

    def record(self, step: int) -> None:
        """See `transport.Transport.record`."""
        self._release_fence()

    def wait(self, rank: int, step: int) -> None:
        """See `transport.Transport.wait`."""
        self._acquire_fence()
