"""The memory for the tensors of a collective: slots and folded areas of all ranks of a host. Imports torch.

The control page, which is always in host memory, has the counters, descriptions and failure marks. This module has the
tensors' memory and orders accesses to it. Host memory needs only CPU fences: once a rank sees that a peer's counter has
reached a step, it may read the peer's data of that step. On a device the counter only means that the peer has enqueued
its work: `device.memory` makes the stream wait for the writers before a read, and for the readers before a write.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import torch

from .atomics import make_fences

_ALIGNMENT_BYTES = 4096
_MAX_VIEWS = 2048
# Size in bytes of a rank's table of areas.
MAX_PLACES = 64


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
    function = ctypes.PyDLL(None).memmove
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function


class Places:
    """Choose the area for each chunk of a rank: the most recently freed one, which is most likely still in the caches.

    Pure; the caller announces the area to the other ranks.

    Args:
        num_areas: Number of areas of the rank.
    """

    def __init__(self, num_areas: int) -> None:
        self.free = list(range(num_areas - 1, -1, -1))
        # Each chunk that others may still read, and its area.
        self.used: deque[tuple[int, int]] = deque()

    def choose(self, chunk: int, through: int) -> int:
        """Return the area of a chunk.

        Args:
            chunk: Number of the chunk, higher than in all earlier calls.
            through: The last chunk that all ranks have finished.
        """
        used, free = self.used, self.free
        while used and used[0][0] <= through:
            free.append(used.popleft()[1])
        area = free.pop()
        used.append((chunk, area))
        return area


class _Views(dict[int, torch.Tensor]):
    """Views of the areas of one rank, created on first use."""

    def __init__(self, areas: list[torch.Tensor], dtype: torch.dtype, start: int, end: int) -> None:
        self._areas, self._dtype, self._start, self._end = areas, dtype, start, end

    def __missing__(self, area: int) -> torch.Tensor:
        with torch.inference_mode(False):
            view = self[area] = self._areas[area].view(self._dtype)[self._start : self._end]
        return view


class SlotMemory:
    """Slots and folded areas of one group on one host. By default a chunk uses the same slot number on every rank.

    Args:
        memory: 1-D uint8 tensor of `memory_bytes`, mapped by the caller: each rank's first slot, each rank's second,
            and so on; then the folded areas in the same order.
        chunk_bytes: Size of a slot in bytes; a multiple of 4096.
        folded_bytes: Size of each rank's folded area in bytes; multiples of 4096.
        num_slots: Number of slots of each rank, at least 2.
        rank: Local rank of this process.

    Attributes:
        chunk_bytes: See above.
        num_slots: See above.
        slot_places: For each local rank, the number of the slot of a chunk, indexed by chunk modulo `num_slots`.
        folded_places: The same for its folded areas.
        stacks: Whether it is faster to reduce all slots at once than one after the other.
        release_fence: Fence: orders this rank's earlier accesses before its later stores of a counter.
        copy_fence: The same after accesses by `copy_function` only.
        acquire: Fence: orders this rank's later accesses after those of ranks whose counters it has read.
    """

    stacks = False

    def __init__(
        self, memory: torch.Tensor, chunk_bytes: int, folded_bytes: Sequence[int], num_slots: int, rank: int
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.num_slots = num_slots
        self._rank = rank
        fences = make_fences()
        self.release_fence, self.copy_fence = fences.release, fences.store
        self.acquire = fences.acquire
        # Indexed by slot number, then by local rank.
        num_ranks = len(folded_bytes)
        end = num_slots * num_ranks * chunk_bytes
        self._stacks = memory[:end].view(num_slots, num_ranks, chunk_bytes)
        folded = [areas.split_with_sizes(list(folded_bytes)) for areas in memory[end:].view(num_slots, -1)]
        # Indexed by local rank, then by slot number.
        self._slots = [list(slots) for slots in self._stacks.unbind(1)]
        self._folded = [[areas[r] for areas in folded] for r in range(num_ranks)]
        same = bytes(range(num_slots))
        self.slot_places: list[Sequence[int]] = [same] * num_ranks
        self.folded_places: list[Sequence[int]] = [same] * num_ranks
        # Views are cached: creating them would take too long for a small collective.
        self._views: dict[tuple[bool, torch.dtype, int, int], list[_Views]] = {}

    def slot(self, rank: int, chunk: int, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
        """Return elements `start` to `end` of a rank's slot of a chunk.

        Returns:
            A 1-D view of `dtype`; the whole slot has `chunk_bytes`. This object owns the memory.
        """
        views = self._views.get((False, dtype, start, end)) or self._make_views(False, dtype, start, end)
        return views[rank][self.slot_places[rank][chunk % self.num_slots]]

    def stack(self, chunk: int, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
        """Return the elements of all ranks as one 2-D view, with one row per rank. Only if `stacks` is true."""
        with torch.inference_mode(False):
            return self._stacks[chunk % self.num_slots].view(dtype)[:, start:end]

    def folded(self, rank: int, chunk: int, dtype: torch.dtype, end: int) -> torch.Tensor:
        """Return the first `end` elements of a rank's folded area, which holds its reduced part of a chunk.

        `local.ReductionPlan.folded_bytes` is the size of the area.
        """
        views = self._views.get((True, dtype, 0, end)) or self._make_views(True, dtype, 0, end)
        return views[rank][self.folded_places[rank][chunk % self.num_slots]]

    def views(self, folded: bool, dtype: torch.dtype, start: int, end: int) -> list[_Views]:
        """Return elements `start` to `end` of all slots or folded areas, by local rank and number of the area."""
        return self._views.get((folded, dtype, start, end)) or self._make_views(folded, dtype, start, end)

    def _make_views(self, folded: bool, dtype: torch.dtype, start: int, end: int) -> list[_Views]:
        if len(self._views) >= _MAX_VIEWS // self.num_slots:
            self._views.clear()
        areas = self._folded if folded else self._slots
        views = self._views[folded, dtype, start, end] = [_Views(of_rank, dtype, start, end) for of_rank in areas]
        return views

    def attach(self, words: Sequence[int], counters: Sequence[int], places: Sequence[memoryview]) -> None:
        """Set the parts of the control page that this object uses. Called once, before all other methods.

        Args:
            words: The page as 8-byte integers.
            counters: Index in `words` of each rank's counts.
            places: For each rank, which alone writes them, two tables of `MAX_PLACES` bytes: slots and folded areas.
        """

    def record(self, progress: int) -> None:
        """Order this rank's earlier accesses before the store of `progress` in its counter."""
        self.release_fence()

    def wait(self, ranks: Sequence[int], kind: int, value: int) -> None:
        """Order this rank's later accesses after those that `ranks` made before their count reached `value`."""

    def prepare_put(self, chunk: int, read: int, readers: Sequence[int]) -> None:
        """Prepare this rank's slot of a chunk for writing.

        Args:
            chunk: Number of the chunk.
            read: The last chunk that all ranks have read.
            readers: Ranks that will read the slot.
        """

    def prepare_fold(self, chunk: int, done: int) -> None:
        """Prepare this rank's folded area of a chunk for writing; all ranks have finished the chunks up to `done`."""

    def close(self) -> None:
        """Drop all views of the memory. Repeated calls have no effect."""
        self._slots, self._folded, self._stacks = [], [], torch.empty(0)
        self._views = {}


class HostMemory(SlotMemory):
    """Slots in host memory; each rank uses as few as possible. For the arguments see `SlotMemory`.

    There are enough slots for a rank to continue while another one is late. Using all of them in turn would evict each
    chunk from the caches before it is read; on an idle machine two or three slots are enough.

    Attributes:
        own_addresses: Addresses of this rank's slots, by number of the slot.
        folded_addresses: For each local rank, the addresses of its folded areas.
        is_closed: Whether `close` was called.
    """

    def __init__(
        self, memory: torch.Tensor, chunk_bytes: int, folded_bytes: Sequence[int], num_slots: int, rank: int
    ) -> None:
        super().__init__(memory, chunk_bytes, folded_bytes, num_slots, rank)
        self._own_slots, self._own_folded = Places(num_slots), Places(num_slots)
        self.own_addresses = [slot.data_ptr() for slot in self._slots[rank]]
        self.folded_addresses = [[area.data_ptr() for area in of_rank] for of_rank in self._folded]
        self.is_closed = False

    def attach(self, words: Sequence[int], counters: Sequence[int], places: Sequence[memoryview]) -> None:
        """See `SlotMemory.attach`."""
        self.slot_places = [table[:MAX_PLACES] for table in places]
        self.folded_places = [table[MAX_PLACES:] for table in places]
        self._own_table = places[self._rank]

    def prepare_put(self, chunk: int, read: int, readers: Sequence[int]) -> None:
        """Choose the slot."""
        self._announce(chunk % self.num_slots, self._own_slots.choose(chunk, read))

    def prepare_fold(self, chunk: int, done: int) -> None:
        """Choose the area."""
        self._announce(MAX_PLACES + chunk % self.num_slots, self._own_folded.choose(chunk, done))

    def _announce(self, index: int, area: int) -> None:
        # A store takes the cache line from the other ranks, also if the value is the same.
        if self._own_table[index] != area:
            self._own_table[index] = area

    def close(self) -> None:
        """See `SlotMemory.close`."""
        super().close()
        self.is_closed = True
        self.slot_places, self.folded_places = [], []
        self._own_table = memoryview(b"")
