"""Set up a group's device memory, at its first call with CUDA tensors. Runs in every rank; imports torch.

The ranks exchange messages through the host memory that they share already, so a rank that dies or never comes is noticed as
in any other call. After each step all ranks exchange whether it worked. If it failed on one, all ranks give up with the same
reason, and the group's CUDA tensors are staged from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from .. import knobs
from .._torch import RedOpType
from ..errors import IpcUnavailableError
from ..host.arena import Arena, ArenaName, attach_arena, create_arena
from ..host.memory import memory_bytes
from ..protocol.control import control_bytes
from ..protocol.description import Terms, describe_call, first_on_device
from ..protocol.engine import Engine
from ..protocol.local import LEADER, LocalCollectives
from ..protocol.reductions import Reduction
from ..protocol.setup import share
from .memory import NUM_SLOTS, DeviceMemory, DeviceParts, free_retired, give_up
from .runtime import CommunicationStream, wait_on_host
from .timeline import Timeline, timeline_bytes

logger = logging.getLogger(__name__)

# Seconds for each step once all ranks have come. Some steps wait until the device is idle.
STEP_S = 60.0
_CHECKED_BYTES = 64 * 1024
_SET_UP = describe_call("device memory set-up")
# Of the check: twice round the ring of two slots.
_NUM_CHECKS = 4


@dataclass(frozen=True)
class DeviceLane:
    """What a group has once its device memory works.

    Attributes:
        collectives: Collectives of the group.
        memory: Their transport.
    """

    collectives: LocalCollectives
    memory: DeviceMemory


class DeviceSetup:
    """One attempt to set device memory up; every rank of the group makes it in the same call.

    Args:
        host: Collectives of the group's CPU tensors; all ranks are on one host.
        names: Name of each rank in messages.
        stream: The group's stream on this rank's device.
    """

    def __init__(self, host: LocalCollectives, names: Sequence[str], stream: CommunicationStream) -> None:
        self._host = host
        self._names = names
        self._stream = stream
        self._runtime = stream.runtime
        self._rank = host.rank
        self._size = host.num_ranks

    def run(self, first_call: Terms) -> DeviceLane:
        """Set it up.

        Args:
            first_call: Terms of the call that needs it, and for which the ranks wait.

        Raises:
            IpcUnavailableError: Device memory cannot be used; every rank raises the same text.
            IpcError: A rank did not come or died; the group is broken.
        """
        infos = self._share(self._hello, first_on_device(first_call))
        num_devices = len({info["uuid"] for info in infos})
        if num_devices > 1:
            raise IpcUnavailableError(f"the ranks are on {num_devices} devices")
        parts = self._allocate(min(info["chunk"] for info in infos))
        try:
            arena = self._connect(parts)
        except IpcUnavailableError:
            # Nothing has been issued to the device, so all can be given back.
            answers = self._share(lambda: {"unmapped": parts.close_imports(self._runtime)})
            if all(answer["unmapped"] for answer in answers):
                parts.free_own(self._runtime)
            raise
        try:
            return self._start(parts, arena, infos[LEADER]["one_pass"])
        except IpcUnavailableError:
            # The device may be stuck in what was issued: freeing would wait for it, also that of torch's own memory.
            if parts.timeline is not None:
                parts.timeline.release()
            give_up()
            raise

    def _share(self, step: Callable[[], dict[str, Any]], terms: Terms | None = None) -> list[dict[str, Any]]:
        """Run a step of the set-up on this rank and exchange its result with all ranks.

        Raises:
            IpcUnavailableError: The step failed on some rank; every rank raises the first rank's reason.
        """
        return share(self._host, self._names, step, terms or Terms.within(_SET_UP, STEP_S))

    def _hello(self) -> dict[str, Any]:
        if knobs.device_path() == "staged":
            return {"error": f"{knobs.DEVICE_PATH_ENV_VAR}=staged is set"}
        if missing := self._runtime.missing():
            return {"error": missing}
        return {
            "uuid": self._runtime.uuid(),
            "chunk": knobs.device_chunk_bytes(),
            "one_pass": knobs.device_one_pass_bytes(),
        }

    def _allocate(self, chunk_bytes: int) -> DeviceParts:
        """Allocate the first rank's block, with the largest half, quarter, ... of the chunk size that the device has."""
        while True:
            parts = DeviceParts(chunk_bytes, [chunk_bytes] + [0] * (self._size - 1))
            answers = self._share(partial(self._allocate_block, parts))
            if not answers[LEADER]["short"]:
                return parts
            chunk_bytes = chunk_bytes // 2 // 4096 * 4096
            if chunk_bytes < knobs.MIN_CHUNK_BYTES:
                raise IpcUnavailableError("there is not enough free device memory even for small slots")

    def _allocate_block(self, parts: DeviceParts) -> dict[str, Any]:
        free_retired()
        if self._rank != LEADER:
            return {}
        num_bytes = memory_bytes(parts.chunk_bytes, parts.folded_bytes, NUM_SLOTS)
        try:
            try:
                parts.block = self._runtime.allocate(num_bytes)
            except MemoryError:
                self._runtime.trim()
                parts.block = self._runtime.allocate(num_bytes)
        except MemoryError:
            return {"short": True}
        return {"short": False}

    def _connect(self, parts: DeviceParts) -> Arena:
        """Map the first rank's block, the device's control page and its timeline."""
        arena: Arena | None = None
        with contextlib.ExitStack() as stack:

            def export() -> dict[str, Any]:
                nonlocal arena
                if self._rank != LEADER:
                    return {}
                assert parts.block is not None
                arena, name = create_arena(control_bytes(self._size) + timeline_bytes(self._size))
                stack.callback(os.close, name.fd)
                return {"block": self._runtime.export(parts.block).hex(), "arena": asdict(name)}

            answers = self._share(export)

            def attach() -> dict[str, Any]:
                nonlocal arena
                if arena is None:
                    arena = attach_arena(ArenaName(**answers[LEADER]["arena"]))
                parts.timeline = Timeline(self._runtime, arena, control_bytes(self._size), self._rank, self._size)
                if self._rank != LEADER:
                    handle = bytes.fromhex(answers[LEADER]["block"])
                    parts.block = self._runtime.open(
                        handle, memory_bytes(parts.chunk_bytes, parts.folded_bytes, NUM_SLOTS)
                    )
                return {}

            self._share(attach)
        assert arena is not None
        return arena

    def _start(self, parts: DeviceParts, arena: Arena, one_pass_bytes: int) -> DeviceLane:
        """Make the collectives and try them."""
        host = self._host.engine
        memory = DeviceMemory(self._runtime, self._stream.stream, parts, self._rank)
        engine = Engine(arena, self._rank, host.waiter.peers, list(self._names), memory)
        local = LocalCollectives(engine, one_pass_bytes)

        def check() -> dict[str, Any]:
            check_collectives(local, self._stream, STEP_S / 2)
            return {}

        self._share(check)
        # From here on a failure in either memory ends the group.
        engine.waiter.beside, host.waiter.beside = host.waiter, engine.waiter
        engine.on_failure.append(host.fail)
        for each in (engine, host):
            each.on_raise.append(memory.release)
        logger.log(
            logging.INFO if self._rank == 0 else logging.DEBUG,
            "ray_fracbackend: ipc device memory for %d ranks, chunks of %d bytes",
            self._size,
            memory.chunk_bytes,
        )
        return DeviceLane(local, memory)


def check_collectives(local: LocalCollectives, stream: CommunicationStream, patience_s: float) -> None:
    """Map every peer's slots, wait for every peer's stream, compare exactly.

    Args:
        local: Collectives of this rank's device, not used before.
        stream: The group's stream.
        patience_s: Seconds to wait for other ranks, and again for the device.

    Raises:
        IpcError: A peer did not come.
        RuntimeError: The device did not finish, or delivered wrong bytes.
    """
    runtime, size = stream.runtime, local.num_ranks
    # One element more than one pass takes, if that fits a slot, so that two passes are tried as well.
    reduced = torch.Size([min(local.one_pass_bytes, local.engine.transport.chunk_bytes) // 4 + 1])
    received: list[tuple[torch.Tensor, int]] = []
    with runtime.on(stream.stream):
        for number in range(_NUM_CHECKS):
            own = torch.full((_CHECKED_BYTES,), _value(local.rank, number), dtype=torch.uint8, device=runtime.device)
            parts = [torch.zeros_like(own) for _ in range(size)]
            terms = Terms.within(describe_call("device memory check", own.dtype, own.shape), patience_s)
            local.gather(own, parts, None, terms)
            received += [(part, _value(rank, number)) for rank, part in enumerate(parts)]
        # The second is added up in another type.
        for dtype in (torch.float32, torch.bfloat16):
            total = torch.full(reduced, local.rank % 8 + 1.0, dtype=dtype, device=runtime.device)
            terms = Terms.within(describe_call("device memory check", dtype, reduced), patience_s)
            local.reduce(total, None, Reduction(dtype, RedOpType.SUM, size), terms)
            received.append((total, sum(rank % 8 + 1 for rank in range(size))))
        done = runtime.new_event()
        done.record(stream.stream)
    wait_on_host(done, patience_s)
    for tensor, expected in received:
        if not bool((tensor.cpu() == expected).all()):
            raise RuntimeError("device memory that was mapped from another process holds wrong data")


def _value(rank: int, number: int) -> int:
    return (rank * _NUM_CHECKS + number) % 251 + 1
