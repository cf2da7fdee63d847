"""The memory for the tensors of a collective: slots and folded areas of all ranks of a host. Imports torch.

The control page, which is always in host memory, has the counters, descriptions and failure marks. This module has the
tensors' memory and orders accesses to it. Host memory needs only CPU fences: once a rank sees that a peer's counter has
reached a step, it may read the peer's data of that step. On a device the counter only means that the peer has enqueued
its work: `device.memory` makes the stream wait for the writers before a read, and for the readers before a write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from .atomics import make_fence

_ALIGNMENT_BYTES = 4096
_MAX_VIEWS = 2048


def share_bytes(chunk_bytes: int, num_ranks: int) -> int:
    """Return the bytes of one rank's share of a chunk, rounded up to whole pages, with room to align any dtype."""
    share = -(-chunk_bytes // num_ranks) + 64
    return -(-share // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def memory_bytes(chunk_bytes: int, folded_bytes: Sequence[int], num_slots: int) -> int:
    """Return the total bytes for all ranks of a host.

    Args:
        chunk_bytes: Size of a slot in bytes.
        folded_bytes: Size of each rank's folded area in bytes.
        num_slots: Number of slots, and of folded areas, of each rank.
    """
    return num_slots * (len(folded_bytes) * chunk_bytes + sum(folded_bytes))


def copy_function() -> Callable[[int, int, int], None]:
    """Return libc's ``memmove(target, source, num_bytes)``, for addresses: ``copy_`` needs twice the time for 4 KiB.

    It keeps the GIL, which another thread would otherwise hold for milliseconds after each small copy.
    """
    return _memmove(ctypes.PyDLL(None))


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function = library.memmove
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function


class _Views(dict[int, torch.Tensor]):
    """Views of the areas of one rank, created on first use."""

    def __init__(self, areas: list[torch.Tensor], dtype: torch.dtype, start: int, end: int) -> None:
        self._areas, self._dtype, self._start, self._end = areas, dtype, start, end

    def __missing__(self, area: int) -> torch.Tensor:
        with torch.inference_mode(False):
            view = self[area] = self._areas[area].view(self._dtype)[self._start : self._end]
        return view


class SlotMemory:
    """Slots and folded areas of one group on one host. Chunk ``c`` uses slot ``c % num_slots`` of every rank.

    Args:
        memory: 1-D uint8 tensor of `memory_bytes`, mapped by the caller: the first rank's slots, the second's, and so on;
            then the folded areas in the same order.
        chunk_bytes: Size of a slot in bytes; a multiple of 4096.
        folded_bytes: Size of each rank's folded area in bytes; multiples of 4096.
        num_slots: Number of slots of each rank, at least 2.
        rank: Local rank of this process.

    Attributes:
        chunk_bytes: See above.
        num_slots: See above.
        by_leader: Whether the first rank reduces whole chunks, from the slots of all ranks at once, and not each rank its share.
        fence: Orders this rank's earlier accesses before its later stores of a counter; not needed after `copy_function`.
    """

    by_leader = False

    def __init__(
        self, memory: torch.Tensor, chunk_bytes: int, folded_bytes: Sequence[int], num_slots: int, rank: int
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.num_slots = num_slots
        self._rank = rank
        self.fence = make_fence()
        # Indexed by local rank, then by slot number.
        end = num_slots * len(folded_bytes) * chunk_bytes
        self._stacks = memory[:end].view(-1, num_slots, chunk_bytes)
        self._slots = [list(slots) for slots in self._stacks]
        folded = memory[end:].split_with_sizes([num_slots * num_bytes for num_bytes in folded_bytes])
        self._folded = [list(areas.view(num_slots, n)) for areas, n in zip(folded, folded_bytes, strict=True)]
        # Views are cached: creating them would take too long for a small collective.
        self._views: dict[tuple[bool, torch.dtype, int, int], list[_Views]] = {}

    def slot(self, rank: int, chunk: int, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
        """Return elements `start` to `end` of a rank's slot of a chunk.

        Returns:
            A 1-D view of `dtype`; the whole slot has `chunk_bytes`. This object owns the memory.
        """
        views = self._views.get((False, dtype, start, end)) or self._make_views(False, dtype, start, end)
        return views[rank][chunk % self.num_slots]

    def stack(self, chunk: int, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
        """Return the elements of all ranks as one 2-D view, with one row per rank."""
        with torch.inference_mode(False):
            return self._stacks[:, chunk % self.num_slots].view(dtype)[:, start:end]

    def folded(self, rank: int, chunk: int, dtype: torch.dtype, end: int) -> torch.Tensor:
        """Return the first `end` elements of a rank's folded area, which holds its reduced part of a chunk.

        The area has its rank's number of `folded_bytes`.
        """
        views = self._views.get((True, dtype, 0, end)) or self._make_views(True, dtype, 0, end)
        return views[rank][chunk % self.num_slots]

    def views(self, folded: bool, dtype: torch.dtype, start: int, end: int) -> list[_Views]:
        """Return elements `start` to `end` of all slots or folded areas, by local rank and number."""
        return self._views.get((folded, dtype, start, end)) or self._make_views(folded, dtype, start, end)

    def _make_views(self, folded: bool, dtype: torch.dtype, start: int, end: int) -> list[_Views]:
        if len(self._views) >= _MAX_VIEWS // self.num_slots:
            self._views.clear()
        areas = self._folded if folded else self._slots
        views = self._views[folded, dtype, start, end] = [_Views(of_rank, dtype, start, end) for of_rank in areas]
        return views

    def attach(self, words: Sequence[int], counters: Sequence[int]) -> None:
        """Set the parts of the control page that this object uses. Called once, before all other methods.

        Args:
            words: The page as 8-byte integers.
            counters: Index in `words` of each rank's counts.
        """

    def announce(self, progress: int) -> None:
        """Order this rank's earlier accesses before the store of `progress` in its counter."""
        self.fence()

    def after(self, ranks: Sequence[int], kind: int, value: int) -> None:
        """Order this rank's later accesses after those that `ranks` made before their count reached `value`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between 1-D contiguous tensors of one dtype and size, of which one is this memory."""
        target.copy_(source)

    def prepare_put(self, chunk: int, readers: Sequence[int]) -> None:
        """Prepare this rank's slot of a chunk, which `readers` will read, for writing."""

    def close(self) -> None:
        """Drop all views of the memory. Repeated calls have no effect."""
        self._slots, self._folded, self._stacks = [], [], torch.empty(0)
        self._views = {}


class HostMemory(SlotMemory):
    """Slots in host memory. For the arguments see `SlotMemory`.

    Attributes:
        slot_addresses: For each local rank, the addresses of its slots.
        folded_addresses: The same of its folded areas.
        is_closed: Whether `close` was called.
    """

    def __init__(
        self, memory: torch.Tensor, chunk_bytes: int, folded_bytes: Sequence[int], num_slots: int, rank: int
    ) -> None:
        super().__init__(memory, chunk_bytes, folded_bytes, num_slots, rank)
        self.slot_addresses = [[slot.data_ptr() for slot in of_rank] for of_rank in self._slots]
        self.folded_addresses = [[area.data_ptr() for area in of_rank] for of_rank in self._folded]
        self.is_closed = False
        self._memmove = _memmove(ctypes.CDLL(None))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `SlotMemory.copy`. libc's copy of a chunk takes three quarters of the time of torch's."""
        if type(target) is type(source) is torch.Tensor:
            self._memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:  # a class that unwraps itself
            target.copy_(source)

    def close(self) -> None:
        """See `SlotMemory.close`."""
        super().close()
        self.is_closed = True
