"""The memory that tensors pass through: slots and folded areas of all ranks of a host. Imports torch.

Counters, descriptions and failure marks are on the control page, which is always in host memory. This is the memory for the
tensors, and the order of accesses to it. Host memory is ordered by CPU fences alone: a rank that has seen a peer's counter reach a
step may read what that peer wrote for it. On a device that says only that the peer has issued its work: `device.memory` makes its
stream wait, for the ranks whose memory is read and before memory is written again, for those that read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from .atomics import make_fences

_ALIGNMENT_BYTES = 4096
_MAX_VIEWS = 2048
# Bytes of a rank's table of places.
MAX_PLACES = 64


def share_bytes(chunk_bytes: int, num_ranks: int) -> int:
    """Return the bytes of one rank's share of a chunk, rounded up so that every dtype and page boundary fits."""
    share = -(-chunk_bytes // num_ranks) + 64
    return -(-share // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def memory_bytes(chunk_bytes: int, folded_bytes: Sequence[int], num_slots: int) -> int:
    """Return the bytes that the ranks of a host need together.

    Args:
        chunk_bytes: Size of a slot in bytes.
        folded_bytes: Size of each rank's folded area in bytes.
        num_slots: Slots, and folded areas, of each rank.
    """
    return num_slots * (len(folded_bytes) * chunk_bytes + sum(folded_bytes))


class Places:
    """Where a rank puts its chunks: of the free areas the one that was freed last, which is the likeliest to be in the caches.

    Pure; the caller tells the other ranks.

    Args:
        num_areas: Areas of the rank.
    """

    def __init__(self, num_areas: int) -> None:
        self.free = list(range(num_areas - 1, -1, -1))
        # Each chunk that others may still read, and its area.
        self.used: deque[tuple[int, int]] = deque()

    def choose(self, chunk: int, through: int) -> int:
        """Return the area of a chunk.

        Args:
            chunk: Higher than all before.
            through: The last chunk that all ranks are through with.
        """
        used, free = self.used, self.free
        while used and used[0][0] <= through:
            free.append(used.popleft()[1])
        area = free.pop()
        used.append((chunk, area))
        return area


class _Views(dict[int, torch.Tensor]):
    """Views of the areas of one rank, made when they are asked for."""

    def __init__(self, areas: list[torch.Tensor], dtype: torch.dtype, start: int, end: int) -> None:
        self._areas, self._dtype, self._start, self._end = areas, dtype, start, end

    def __missing__(self, area: int) -> torch.Tensor:
        with torch.inference_mode(False):
            view = self[area] = self._areas[area].view(self._dtype)[self._start : self._end]
        return view


class SlotMemory:
    """Slots and folded areas of one group on one host. A chunk is in the same slot of every rank.

    Args:
        memory: `memory_bytes` of it, 1-D uint8, mapped by the caller: each rank's first slot, each rank's second, and so on; then the
            folded areas likewise.
        chunk_bytes: Size of a slot in bytes; a multiple of 4096.
        folded_bytes: Size of each rank's folded area in bytes; multiples of 4096.
        num_slots: Slots of each rank, at least 2.
        rank: Local rank of this process.

    Attributes:
        chunk_bytes: As given.
        num_slots: As given.
        stacks: Whether a reduction of all slots at once is faster than one after the other.
        acquire: Orders this rank's further accesses after those of the ranks whose counters were seen.
    """

    stacks = False

    def __init__(
        self, memory: torch.Tensor, chunk_bytes: int, folded_bytes: Sequence[int], num_slots: int, rank: int
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.num_slots = num_slots
        self._rank = rank
        fences = make_fences()
        self._release_fence = fences.release
        self.acquire = fences.acquire
        # By number of the slot, then by local rank.
        num_ranks = len(folded_bytes)
        end = num_slots * num_ranks * chunk_bytes
        self._stacks = memory[:end].view(num_slots, num_ranks, chunk_bytes)
        folded = [areas.split_with_sizes(list(folded_bytes)) for areas in memory[end:].view(num_slots, -1)]
        # By local rank, then by number.
        self._slots = [list(slots) for slots in self._stacks.unbind(1)]
        self._folded = [[areas[r] for areas in folded] for r in range(num_ranks)]
        # Of chunks modulo the slots, by local rank: the number of the slot, and of the folded area.
        same = bytes(range(num_slots))
        self._slot_places: list[Sequence[int]] = [same] * num_ranks
        self._folded_places: list[Sequence[int]] = [same] * num_ranks
        # Views are kept, because making them costs more than a small collective has to spare.
        self._views: dict[tuple[bool, torch.dtype, int, int], list[_Views]] = {}

    def slot(self, rank: int, chunk: int, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
        """Return elements `start` to `end` of a rank's slot of a chunk.

        Returns:
            A 1-D view of `dtype`; the whole slot is `chunk_bytes` long. This object owns the memory.
        """
        views = self._views.get((False, dtype, start, end)) or self._make_views(False, dtype, start, end)
        return views[rank][self._slot_places[rank][chunk % self.num_slots]]

    def stack(self, chunk: int, dtype: torch.dtype, start: int, end: int) -> torch.Tensor:
        """Return the same of all ranks as one 2-D view, with a row for each; where `stacks` is true."""
        with torch.inference_mode(False):
            return self._stacks[chunk % self.num_slots].view(dtype)[:, start:end]

    def folded(self, rank: int, chunk: int, dtype: torch.dtype, end: int) -> torch.Tensor:
        """Return the first `end` elements of the memory for what a rank reduces of a chunk.

        It is as long as `local.ReductionPlan.folded_bytes` says.
        """
        views = self._views.get((True, dtype, 0, end)) or self._make_views(True, dtype, 0, end)
        return views[rank][self._folded_places[rank][chunk % self.num_slots]]

    def _make_views(self, folded: bool, dtype: torch.dtype, start: int, end: int) -> list[_Views]:
        if len(self._views) >= _MAX_VIEWS // self.num_slots:
            self._views.clear()
        areas = self._folded if folded else self._slots
        views = self._views[folded, dtype, start, end] = [_Views(of_rank, dtype, start, end) for of_rank in areas]
        return views

    def attach(self, words: Sequence[int], counters: Sequence[int], places: Sequence[memoryview]) -> None:
        """Take note of what the ranks share on the control page; called once, before all others.

        Args:
            words: The page.
            counters: Index of each rank's counts in it.
            places: Two tables of `MAX_PLACES` bytes for each rank, of its slots and of its folded areas, which it alone writes.
        """

    def record(self, progress: int) -> None:
        """Order this rank's accesses so far before its counter shows `progress`."""
        self._release_fence()

    def wait(self, ranks: Sequence[int], kind: int, value: int) -> None:
        """Order this rank's further accesses after those with which `ranks` came to a count that was seen, see `schedule`."""

    def prepare_put(self, chunk: int, read: int, readers: Sequence[int]) -> None:
        """Get this rank's slot of a chunk ready to be written.

        Args:
            chunk: Its number.
            read: The last chunk that all ranks have read.
            readers: Ranks that will read the slot.
        """

    def prepare_fold(self, chunk: int, done: int) -> None:
        """Get this rank's folded area of a chunk ready to be written; all ranks are done with the chunks up to `done`."""

    def close(self) -> None:
        """Drop all views of the memory. May be called again."""
        self._slots, self._folded, self._stacks = [], [], torch.empty(0)
        self._views = {}


class HostMemory(SlotMemory):
    """Slots in memory of the host, of which each rank uses as few as it can. Arguments as for `SlotMemory`.

    With as many slots as let a rank go on where another is late, going round through all of them would take each chunk out of the
    caches before it is read: on a quiet machine two or three are enough.
    """

    def __init__(
        self, memory: torch.Tensor, chunk_bytes: int, folded_bytes: Sequence[int], num_slots: int, rank: int
    ) -> None:
        super().__init__(memory, chunk_bytes, folded_bytes, num_slots, rank)
        self._own_slots, self._own_folded = Places(num_slots), Places(num_slots)

    def attach(self, words: Sequence[int], counters: Sequence[int], places: Sequence[memoryview]) -> None:
        """See `SlotMemory.attach`."""
        self._slot_places = [table[:MAX_PLACES] for table in places]
        self._folded_places = [table[MAX_PLACES:] for table in places]
        self._own_table = places[self._rank]

    def prepare_put(self, chunk: int, read: int, readers: Sequence[int]) -> None:
        """Choose the slot."""
        self._own_table[chunk % self.num_slots] = self._own_slots.choose(chunk, read)

    def prepare_fold(self, chunk: int, done: int) -> None:
        """Choose the area."""
        self._own_table[MAX_PLACES + chunk % self.num_slots] = self._own_folded.choose(chunk, done)

    def close(self) -> None:
        """See `SlotMemory.close`."""
        super().close()
        self._slot_places, self._folded_places = [], []
        self._own_table = memoryview(b"")
