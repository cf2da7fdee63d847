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
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from .. import knobs
from .._torch import RedOpType
from ..errors import IpcUnavailableError
from ..host.arena import ArenaName, attach_arena, create_arena
from ..protocol.control import control_bytes
from ..protocol.description import Terms, describe_call, first_on_device
from ..protocol.engine import Engine
from ..protocol.local import LEADER, LocalCollectives
from ..protocol.reductions import Reduction
from ..protocol.setup import share
from .memory import DeviceMemory, block_bytes, free, let_go
from .runtime import CommunicationStream, comes_true
from .timeline import Timeline, are_idle, timeline_bytes

logger = logging.getLogger(__name__)

# Seconds for each step once all ranks have come. Some steps wait until the device is idle.
STEP_S = 60.0
_CHECKED_BYTES = 64 * 1024
_SET_UP = describe_call("device memory set-up")
# Of the check: twice round the ring of two slots.
_NUM_CHECKS = 4


class DeviceCollectives(LocalCollectives):
    """Collectives on device memory."""

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
        self._block: Any = None
        self._timeline: Any = None

    def run(self, first_call: Terms) -> DeviceCollectives:
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
        chunk_bytes = min(info["chunk"] for info in infos)
        try:
            with contextlib.ExitStack() as stack:
                leader = self._share(partial(self._export, chunk_bytes, stack))[LEADER]
                self._share(partial(self._attach, chunk_bytes, leader, stack))
            memory = DeviceMemory(self._block, self._timeline, chunk_bytes, self._rank, self._size)
            engine = Engine(self._arena, self._rank, self._host.engine.waiter.peers, list(self._names), memory)
            local = DeviceCollectives(engine, infos[LEADER]["one_pass"])
            self._share(partial(check_collectives, local, self._stream, STEP_S / 2))
        except IpcUnavailableError:
            answers = self._share(self._undo)
            if all(answer["unmapped"] for answer in answers):
                free(self._runtime, self._block)
            raise
        # From here on a failure in either memory ends the group.
        host = self._host.engine
        engine.waiter.other_memory, host.waiter.other_memory = host.waiter, engine.waiter
        engine.on_failure.append(host.fail)
        for each in (engine, host):
            each.on_raise.append(self._timeline.release)
        logger.log(
            logging.INFO if self._rank == 0 else logging.DEBUG,
            "ray_fracbackend: ipc device memory for %d ranks, chunks of %d bytes",
            self._size,
            chunk_bytes,
        )
        return local

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

    def _export(self, chunk_bytes: int, stack: contextlib.ExitStack) -> dict[str, Any]:
        """On the first rank, make the block, and the memory for the device's control page and its timeline."""
        if self._rank != LEADER:
            return {}
        num_bytes, _ = block_bytes(chunk_bytes, self._size)
        try:
            try:
                self._block = self._runtime.allocate(num_bytes)
            except MemoryError:
                if are_idle():
                    self._runtime.trim()
                self._block = self._runtime.allocate(num_bytes)
        except MemoryError as error:
            size = f"{num_bytes >> 20} MiB for {self._size} ranks with chunks of {chunk_bytes} bytes"
            return {"error": f"{error} ({size}; {knobs.DEVICE_CHUNK_BYTES_ENV_VAR} sets their size)"}
        self._arena, name = create_arena(control_bytes(self._size) + timeline_bytes(self._size))
        stack.callback(os.close, name.fd)
        return {"block": self._runtime.export(self._block).hex(), "arena": asdict(name)}

    def _attach(self, chunk_bytes: int, leader: dict[str, Any], stack: contextlib.ExitStack) -> dict[str, Any]:
        """Map what the first rank has made."""
        if self._rank != LEADER:
            self._arena = attach_arena(ArenaName(**leader["arena"]))
            stack.callback(os.close, self._arena.fd)
        offset = control_bytes(self._size)
        self._timeline = Timeline(self._runtime, self._stream.stream, self._arena, offset, self._rank, self._size)
        if self._rank != LEADER:
            num_bytes, _ = block_bytes(chunk_bytes, self._size)
            self._block = self._runtime.open(bytes.fromhex(leader["block"]), num_bytes)
        return {}

    def _undo(self) -> dict[str, Any]:
        """Let go of what the other ranks have; the device may be stuck in what was issued."""
        if self._timeline is not None:
            self._timeline.release()
        return {"unmapped": let_go(self._runtime, self._block, self._timeline, STEP_S / 10)}


def check_collectives(local: LocalCollectives, stream: CommunicationStream, patience_s: float) -> dict[str, Any]:
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
    if not comes_true(done.query, patience_s):
        raise RuntimeError(f"the device did not finish within {patience_s:.0f} s")
    for tensor, expected in received:
        if not bool((tensor.cpu() == expected).all()):
            raise RuntimeError("device memory that was mapped from another process holds wrong data")
    return {}


def _value(rank: int, number: int) -> int:
    return (rank * _NUM_CHECKS + number) % 251 + 1
