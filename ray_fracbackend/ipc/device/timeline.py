"""Timeline semaphores between the streams of several processes: words that one stream writes and others wait for.

A word is a count that only grows. A wait can therefore be issued before or long after the write that it waits for. The words are in host
memory that the ranks share and that each rank has registered with CUDA. They outlive a process that dies, and the host can end the waits
of its own stream by writing the words itself. A write from another stream might never run: CUDA maps several streams to one hardware
queue, where they wait for each other.

Source: CUDA driver API, "Stream Memory Operations" (cuStreamBatchMemOp) and cuMemHostRegister. A wait compares as signed integers, and a
write comes after all memory that its stream has written before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..host.arena import Arena
from .driver import CudaRuntime

# Words of different processes are on different cache lines.
_WORD_BYTES = 64
_PAGE_BYTES = 4096
# Greater than every step, and the difference to any step is not negative.
_RELEASED = 1 << 62

# A mapping must stay while it is registered. If the stream may be stuck, that is until the process ends.
_registered: set[Timeline] = set()


def timeline_bytes(num_ranks: int) -> int:
    """Return the bytes of the words of `num_ranks` ranks, a multiple of 4096."""
    return -(-num_ranks * num_ranks * _WORD_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def are_idle() -> bool:
    """Return whether all streams of this process that wait for other ranks have completed their work.

    Freeing and unmapping memory wait for all streams, so they must not begin while one may be stuck.
    """
    try:
        return all(timeline.stream.query() for timeline in tuple(_registered))
    except RuntimeError:  # the device is broken
        return False


class Timeline:
    """The words of one rank: for each other rank, one that this rank's stream writes and one that it waits for.

    Args:
        runtime: The device.
        stream: This rank's stream.
        arena: Shared by all ranks.
        offset: Of the words in it, a multiple of 4096.
        rank: Local rank of this process.
        num_ranks: Local ranks.

    Attributes:
        runtime: See above.
        stream: See above.

    Raises:
        DriverError: The memory cannot be registered.
    """

    def __init__(self, runtime: CudaRuntime, stream: Any, arena: Arena, offset: int, rank: int, num_ranks: int) -> None:
        self.runtime = runtime
        self.stream = stream
        self._arena = arena
        words, others = memoryview(arena.memory)[offset:], [other for other in range(num_ranks) if other != rank]
        self._words = words[: timeline_bytes(num_ranks)].cast("q")
        self._address = arena.address + offset
        pointer = runtime.register(self._address, self._words.nbytes)
        # The offset of each word that this rank's stream waits for, and the addresses of all that it writes.
        self._awaited = {other: (other * num_ranks + rank) * _WORD_BYTES for other in others}
        self._written = [pointer + (rank * num_ranks + other) * _WORD_BYTES for other in others]
        self._pointer = pointer
        _registered.add(self)

    def signal(self, step: int) -> None:
        """Have this rank's stream tell every other rank that it has come to `step`."""
        self.runtime.write_words(self.stream, dict.fromkeys(self._written, step))

    def wait(self, steps: Mapping[int, int]) -> None:
        """Have this rank's stream wait until the stream of each of these ranks has come to its step."""
        words = {self._pointer + self._awaited[writer]: step for writer, step in steps.items()}
        self.runtime.wait_for_words(self.stream, words)

    def release(self) -> None:
        """End all waits of this rank's stream; what it computes from then on is unknown."""
        for offset in self._awaited.values():
            self._words[offset // 8] = _RELEASED

    def close(self) -> None:
        """Take the words back from CUDA; this rank's stream must be through with them."""
        _registered.remove(self)
        self.runtime.unregister(self._address)
