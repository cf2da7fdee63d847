"""Device memory that every rank of a device has mapped. Runs in every rank; imports torch.

Each rank owns one block with its slots and folded memory, and a ring of two interprocess events; the others opened both
when the group was set up. What a step has to wait for is an event on the stream, never a kernel that spins: the host only learns
from the counters that a peer has *issued* its work, and makes this rank's stream wait for the peer's event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..host.memory import SlotMemory
from .driver import DeviceBlock
from .runtime import CudaRuntime


@dataclass
class DeviceParts:
    """What one rank has of a device's shared memory.

    Attributes:
        chunk_bytes: Size of a slot in bytes.
        sizes: Bytes of each local rank's block.
        blocks: Blocks by local rank, None where not (or no longer) mapped.
        events: Ring of two events by local rank, as `blocks`.
    """

    chunk_bytes: int
    sizes: list[int]
    blocks: list[DeviceBlock | None] = field(default_factory=list)
    events: list[list[Any]] = field(default_factory=list)

    def close_imports(self, runtime: CudaRuntime, rank: int) -> bool:
        """Unmap the blocks of the other ranks, with which the device must be through; false, and nothing done, where that may hang."""
        if freeing_may_hang():
            return False
        for r, block in enumerate(self.blocks):
            if r != rank and block is not None:
                self.blocks[r] = None
                runtime.release(block)
        return True

    def free_own(self, runtime: CudaRuntime, rank: int) -> None:
        """Free this rank's block, unless that may hang; no other rank may have it mapped."""
        if freeing_may_hang():
            return
        block, self.blocks[rank] = self.blocks[rank], None
        if block is not None:
            runtime.release(block)


class DeviceMemory(SlotMemory):
    """Slots in the memory of one device.

    Args:
        runtime: The device.
        stream: All work on the slots is issued to it, by the thread that holds the turn.
        parts: Blocks and events of all local ranks.
        rank: Local rank of this process.
    """

    def __init__(self, runtime: CudaRuntime, stream: Any, parts: DeviceParts, rank: int) -> None:
        blocks = [
            block.bytes[:size] for block, size in zip(parts.blocks, parts.sizes, strict=True) if block is not None
        ]
        super().__init__(parts.chunk_bytes, blocks)
        self._runtime = runtime
        self._stream = stream
        self._parts = parts
        self._rank = rank

    def record(self, step: int) -> None:
        """See `SlotMemory.record`."""
        self._parts.events[self._rank][step & 1].record(self._stream)
        super().record(step)

    def wait(self, rank: int, step: int) -> None:
        """See `SlotMemory.wait`."""
        super().wait(rank, step)
        self._stream.wait_event(self._parts.events[rank][step & 1])

    def close_imports(self) -> bool:
        """Unmap the other ranks' memory, and return whether that could be done. The stream must be idle."""
        self.close()
        return self._parts.close_imports(self._runtime, self._rank)

    def retire(self, is_unused: Callable[[], bool]) -> None:
        """Free this rank's memory and events now or, if ``is_unused()`` is false, when a later group sees it true."""
        with _retired_lock:
            _retired.append((is_unused, self._runtime, self._parts, self._rank))
        free_retired()


_retired: list[tuple[Callable[[], bool], CudaRuntime, DeviceParts, int]] = []
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
            is_unused, runtime, parts, rank = entry
            if is_unused() and not freeing_may_hang():
                _retired.remove(entry)
                parts.free_own(runtime, rank)
