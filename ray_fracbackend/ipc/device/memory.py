"""Device memory that all ranks of one device have mapped. Runs in every rank; imports torch.

The first rank owns a block with the slots and the folded memory of all ranks, and the other ranks open it when the group is set up. One
kernel can therefore reduce all slots. The counters on the host only show that a peer has *issued* its work. The host then makes this
rank's stream wait for a word that the peer's stream writes. No kernel spins. A stream waits only for ranks whose memory it reads, and for
ranks that read the memory which it overwrites next.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..host.memory import SlotMemory, memory_bytes
from ..protocol.schedule import NUM_COUNTS, READ
from .driver import CudaRuntime, DeviceBlock
from .runtime import comes_true
from .timeline import Timeline, are_idle

# Per rank. With more slots a rank could continue while another is late, but a device runs the ranks one after the other anyway.
NUM_SLOTS = 2


def block_bytes(chunk_bytes: int, num_ranks: int) -> tuple[int, list[int]]:
    """Return the bytes of the block, and of each rank's folded area: only the first rank has one, for a whole chunk."""
    folded_bytes = [chunk_bytes] + [0] * (num_ranks - 1)
    return memory_bytes(chunk_bytes, folded_bytes, NUM_SLOTS), folded_bytes


class DeviceMemory(SlotMemory):
    """Slots in the memory of one device. All work on them is issued to the timeline's stream, by the thread that holds the turn.

    Args:
        block: The first rank's memory, mapped by all.
        timeline: Orders the streams.
        chunk_bytes: Size of a slot in bytes.
        rank: Local rank of this process.
        num_ranks: Local ranks.

    Attributes:
        block: See above.
        timeline: See above.
    """

    by_leader = True

    def __init__(self, block: DeviceBlock, timeline: Timeline, chunk_bytes: int, rank: int, num_ranks: int) -> None:
        num_bytes, folded_bytes = block_bytes(chunk_bytes, num_ranks)
        super().__init__(block.bytes[:num_bytes], chunk_bytes, folded_bytes, NUM_SLOTS, rank)
        self.block = block
        self.timeline = timeline
        self._words: Sequence[int] = ()
        self._counters: Sequence[int] = ()
        # What each rank had counted when this rank's stream last waited for it.
        self._reached = [[0] * NUM_COUNTS for _ in range(num_ranks)]
        # The ranks that read what this rank wrote last, by slot.
        self._readers: list[Sequence[int]] = [()] * NUM_SLOTS

    def attach(self, words: Sequence[int], counters: Sequence[int]) -> None:
        """See `SlotMemory.attach`."""
        self._words, self._counters = words, counters

    def announce(self, progress: int) -> None:
        """See `SlotMemory.announce`."""
        self.timeline.signal(progress)
        super().announce(progress)

    def after(self, ranks: Sequence[int], kind: int, value: int) -> None:
        """See `SlotMemory.after`."""
        words, steps = self._words, {}
        for rank in ranks:
            if rank != self._rank and self._reached[rank][kind] < value:
                index = self._counters[rank]
                # In this order: a rank stores its counter before what it counts.
                counts = [words[index + count] for count in range(1, NUM_COUNTS)]
                steps[rank] = words[index]
                self._reached[rank] = [steps[rank], *counts]
        if steps:
            self.timeline.wait(steps)

    def prepare_put(self, chunk: int, readers: Sequence[int]) -> None:
        """Make this rank's stream wait for the ranks that have read the slot's last chunk."""
        slot = chunk % self.num_slots
        self.after(self._readers[slot], READ, chunk - self.num_slots)
        self._readers[slot] = readers


def let_go(runtime: CudaRuntime, block: DeviceBlock | None, timeline: Timeline | None, patience_s: float) -> bool:
    """Unmap another rank's memory, and take the words back from CUDA.

    Returns:
        Whether that was done: not if a stream of this process may still be stuck after `patience_s` seconds.

    Raises:
        DriverError: The driver refuses.
    """
    if not comes_true(are_idle, patience_s):
        return False
    if timeline is not None:
        timeline.close()
    if block is not None and block.imported:
        runtime.release(block)
    return True


def free(runtime: CudaRuntime, block: DeviceBlock | None) -> None:
    """Free this rank's memory, if it has any, which no other rank may have mapped. The end of the process frees it if a stream may be stuck."""
    if block is not None and not block.imported and are_idle():
        runtime.release(block)
