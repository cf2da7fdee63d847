"""Timeline semaphores between the streams of several processes: words that one stream writes and others wait for.

A word is a count that only grows. A wait can therefore be issued before or long after the write that it waits for. The words are in host
memory that the ranks share and that each rank has registered with CUDA. They outlive a process that dies, and the host can end the waits
of its own stream by writing the words itself. A write from another stream might never run: CUDA maps several streams to one hardware
queue, where they wait for each other.

Source: CUDA driver API, "Stream Memory Operations" (cuStreamWriteValue64, cuStreamWaitValue64) and cuMemHostRegister. A wait compares
as signed integers, and a write comes after all memory that its stream has written before.
"""

from __future__ import annotations

from typing import Any

from ..host.arena import Arena
from .runtime import CudaRuntime

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


class Timeline:
    """The words of one rank: for each other rank, one that this rank's stream writes and one that it waits for.

    Args:
        runtime: The device.
        arena: Shared by all ranks.
        offset: Of the words in it, a multiple of 4096.
        rank: Local rank of this process.
        num_ranks: Local ranks.

    Raises:
        DriverError: The memory cannot be registered.
    """

    def __init__(self, runtime: CudaRuntime, arena: Arena, offset: int, rank: int, num_ranks: int) -> None:
        self._runtime = runtime
        self._rank = rank
        self._num_ranks = num_ranks
        num_bytes = timeline_bytes(num_ranks)
        self._arena = arena
        self._words = memoryview(arena.memory)[offset : offset + num_bytes].cast("q")
        self._address = arena.address + offset
        self._pointer = runtime.register(self._address, num_bytes)
        _registered.add(self)

    def _word(self, writer: int, waiter: int) -> int:
        return (writer * self._num_ranks + waiter) * _WORD_BYTES

    def signal(self, stream: Any, step: int) -> None:
        """Have `stream` tell every other rank that it has come to `step`."""
        for waiter in range(self._num_ranks):
            if waiter != self._rank:
                self._runtime.write_word(stream, self._pointer + self._word(self._rank, waiter), step)

    def wait(self, stream: Any, writer: int, step: int) -> None:
        """Have `stream` wait until the stream of the rank `writer` has come to `step`."""
        self._runtime.wait_for_word(stream, self._pointer + self._word(writer, self._rank), step)

    def release(self) -> None:
        """End all waits of this rank's stream; what it computes from then on is unknown."""
        for writer in range(self._num_ranks):
            if writer != self._rank:
                self._words[self._word(writer, self._rank) // 8] = _RELEASED

    def close(self) -> None:
        """Take the words back from CUDA; this rank's stream must be through with them. May be called again."""
        if self in _registered:
            _registered.remove(self)
            self._runtime.unregister(self._address)
