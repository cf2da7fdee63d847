"""Device memory that all ranks of one device have mapped. Runs in every rank; imports torch.

The first rank owns a block with the slots and the folded memory of all ranks, and the other ranks open it when the group is set up. One
kernel can therefore reduce all slots. The counters on the host only show that a peer has *issued* its work. The host then makes this
rank's stream wait for a word that the peer's stream writes. No kernel spins. A stream waits only for ranks whose memory it reads, and for
ranks that read the memory which it overwrites next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..host.memory import SlotMemory, memory_bytes
from ..protocol.schedule import NUM_COUNTS, READ
from .driver import DeviceBlock
from .runtime import CudaRuntime
from .timeline import Timeline

# Per rank. With more slots a rank could continue while another is late, but a device runs the ranks one after the other anyway.
NUM_SLOTS = 2


@dataclass
class DeviceParts:
    """The parts of a device's shared memory that one rank uses.

    Attributes:
        chunk_bytes: Size of a slot in bytes.
        folded_bytes: Size of each local rank's folded area in bytes.
        block: The first rank's memory, None if it is not (or no longer) mapped.
        timeline: Orders the streams; None before the ranks are connected.
    """

    chunk_bytes: int
    folded_bytes: list[int]
    block: DeviceBlock | None = None
    timeline: Timeline | None = None

    def close_imports(self, runtime: CudaRuntime) -> bool:
        """Unmap another rank's memory, which the device must not use any more. Return False, without unmapping, if that may hang."""
        if freeing_may_hang():
            return False
        if self.timeline is not None:
            self.timeline.close()
        if self.block is not None and self.block.imported:
            self._release(runtime, self.block)
        return True

    def free_own(self, runtime: CudaRuntime) -> None:
        """Free this rank's memory if it has any, unless that may hang; no other rank may have it mapped."""
        if self.block is not None and not self.block.imported and not freeing_may_hang():
            self._release(runtime, self.block)

    def _release(self, runtime: CudaRuntime, block: DeviceBlock) -> None:
        self.block = None
        runtime.release(block)


class DeviceMemory(SlotMemory):
    """Slots in the memory of one device.

    Args:
        runtime: The device.
        stream: All work on the slots is issued to it, by the thread that holds the turn.
        parts: The block, mapped, and the timeline.
        rank: Local rank of this process.
    """

    by_leader = True

    def __init__(self, runtime: CudaRuntime, stream: Any, parts: DeviceParts, rank: int) -> None:
        assert parts.block is not None
        assert parts.timeline is not None
        num_bytes = memory_bytes(parts.chunk_bytes, parts.folded_bytes, NUM_SLOTS)
        super().__init__(parts.block.bytes[:num_bytes], parts.chunk_bytes, parts.folded_bytes, NUM_SLOTS, rank)
        self._runtime = runtime
        self._stream = stream
        self._parts = parts
        self._timeline = parts.timeline
        self._words: Sequence[int] = ()
        self._counters: Sequence[int] = ()
        # What each rank had counted when this rank's stream last waited for it.
        self._reached = [[0] * NUM_COUNTS for _ in parts.folded_bytes]
        # The ranks that read what this rank wrote last, by slot.
        self._readers: list[Sequence[int]] = [()] * NUM_SLOTS

    @property
    def is_owner(self) -> bool:
        """Whether the block belongs to this rank."""
        return self._parts.block is not None and not self._parts.block.imported

    def attach(self, words: Sequence[int], counters: Sequence[int]) -> None:
        """See `SlotMemory.attach`."""
        self._words, self._counters = words, counters

    def record(self, progress: int) -> None:
        """See `SlotMemory.record`."""
        self._timeline.signal(self._stream, progress)
        super().record(progress)

    def wait(self, ranks: Sequence[int], kind: int, value: int) -> None:
        """See `SlotMemory.wait`."""
        for rank in ranks:
            if rank != self._rank and self._reached[rank][kind] < value:
                words, index = self._words, self._counters[rank]
                # In this order: a rank stores its counter before what it counts.
                counts = [words[index + count] for count in range(1, NUM_COUNTS)]
                progress = words[index]
                self._timeline.wait(self._stream, rank, progress)
                self._reached[rank] = [progress, *counts]

    def prepare_put(self, chunk: int, readers: Sequence[int]) -> None:
        """Make this rank's stream wait for the ranks that have read the slot's last chunk."""
        slot = chunk % self.num_slots
        self.wait(self._readers[slot], READ, chunk - self.num_slots)
        self._readers[slot] = readers

    def release(self) -> None:
        """End all waits of this rank's stream for others: the results of calls that are on the device are unknown from then on."""
        self._timeline.release()

    def close_imports(self) -> bool:
        """Unmap the other ranks' memory, and return whether that could be done. The stream must be idle."""
        self.close()
        return self._parts.close_imports(self._runtime)

    def retire(self, is_unused: Callable[[], bool]) -> None:
        """Free this rank's memory now or, if ``is_unused()`` is false, when a later group sees it true."""
        with _retired_lock:
            _retired.append((is_unused, self._runtime, self._parts))
        free_retired()


_retired: list[tuple[Callable[[], bool], CudaRuntime, DeviceParts]] = []
_retired_lock = threading.Lock()
# Not empty once a stream of this process may be stuck: freeing and unmapping wait for all streams.
_lost: list[bool] = []
# Whether the stream of a group may be stuck, for each group whose streams wait for other ranks.
_may_be_stuck: list[Callable[[], bool]] = []


def ask_before_freeing(may_be_stuck: Callable[[], bool]) -> Callable[[], None]:
    """Ask whether a group's stream may be stuck before memory of any group is freed; returns how to stop asking."""
    _may_be_stuck.append(may_be_stuck)
    return lambda: _may_be_stuck.remove(may_be_stuck)


def freeing_may_hang() -> bool:
    """Return whether freeing and unmapping may hang, from now on: they wait for all streams, of which one may be stuck."""
    if not _lost and any(may_be_stuck() for may_be_stuck in tuple(_may_be_stuck)):
        give_up()
    return bool(_lost)


def give_up() -> None:
    """Leave all device memory to the end of the process, because its state is not known any more."""
    _lost.append(True)


def free_retired() -> None:
    """Free what groups of the past could not free because a peer still had it mapped.

    Raises:
        DriverError: The device is broken.
    """
    with _retired_lock:
        for entry in list(_retired):
            is_unused, runtime, parts = entry
            if is_unused() and not freeing_may_hang():
                _retired.remove(entry)
                parts.free_own(runtime)
