"""Set up a group's device memory, at its first call with CUDA tensors. Runs in every rank; imports torch.

The ranks exchange messages through the host memory that they share already, so a rank that dies or never comes is noticed as
in any other call. After each step all ranks exchange whether it worked. If it failed on one, all ranks give up with the same
reason, and Gloo carries the group's CUDA tensors from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from .. import knobs
from .._torch import PrefixStore, ProcessGroupNCCL, RedOpType, stop
from ..errors import IpcUnavailableError
from ..host.arena import Arena, ArenaName, attach_arena, create_arena
from ..host.memory import block_bytes
from ..protocol.collectives import Collectives, HostCollectives
from ..protocol.control import control_bytes
from ..protocol.description import Terms, describe_call, first_on_device
from ..protocol.engine import Engine
from ..protocol.hierarchy import HierarchicalCollectives, gloo_leaders, leads
from ..protocol.local import LEADER, LocalCollectives, ReductionPlan
from ..protocol.reductions import Reduction
from ..protocol.setup import Membership, group_by_host, share
from ..protocol.waiting import Beside
from .memory import DeviceMemory, DeviceParts, free_retired, give_up
from .runtime import CommunicationStream, wait_on_host

logger = logging.getLogger(__name__)

# Seconds for each step once all ranks have come. Some steps wait until the device is idle.
STEP_S = 60.0
_CHECKED_BYTES = 64 * 1024
_SET_UP = describe_call("device memory set-up")
# Of the check: twice round the ring of two slots and events.
_NUM_CHECKS = 4


@dataclass(frozen=True)
class HostSide:
    """What a group has before it has device memory.

    Attributes:
        membership: Ranks of each host.
        local: Collectives of this rank's host.
        collectives: Collectives of the group's CPU tensors.
        gloo: The Gloo group of all ranks.
        store: The group's store.
    """

    membership: Membership
    local: LocalCollectives
    collectives: HostCollectives
    gloo: Any
    store: Any


@dataclass(frozen=True)
class DeviceLane:
    """What a group has once its device memory works.

    Attributes:
        local: Collectives of this rank's device.
        memory: Their transport.
        collectives: Collectives of the group.
        leaders: Groups between the leaders, to be ended with this one.
    """

    local: LocalCollectives
    memory: DeviceMemory
    collectives: Collectives
    leaders: tuple[Any, ...]


class DeviceSetup:
    """One attempt to set device memory up; every rank of the group makes it in the same call.

    Args:
        host: The group so far.
        stream: The group's stream on this rank's device.
        timeout: Default timeout of the group's collectives.
    """

    def __init__(self, host: HostSide, stream: CommunicationStream, timeout: timedelta) -> None:
        self._host = host
        self._stream = stream
        self._runtime = stream.runtime
        self._timeout = timeout
        self._rank = host.membership.rank

    def run(self, first_call: bytes, timeout_s: float) -> DeviceLane:
        """Set it up.

        Args:
            first_call: Description of the call that needs it.
            timeout_s: Seconds to wait for ranks that have not made this call yet.

        Raises:
            IpcUnavailableError: Device memory cannot be used; every rank raises the same text.
            IpcError: A rank did not come or died; the group is broken.
        """
        infos = self._share(self._hello, Terms.within(first_on_device(first_call), timeout_s))
        membership = self._group(infos)
        own = membership.local_ranks.index(self._rank)
        parts = self._allocate(membership, own, min(info["chunk"] for info in infos))
        try:
            arena = self._connect(membership, parts, own)
        except IpcUnavailableError:
            # Nothing has been issued to the device, so all can be given back.
            parts.close_imports(self._runtime, own)
            self._share(dict)
            parts.free_own(self._runtime, own)
            raise
        try:
            return self._start(membership, parts, arena, infos[membership.local_ranks[0]])
        except IpcUnavailableError:
            # The device may be stuck in what was issued: freeing would wait for it.
            give_up()
            raise

    def _share(self, step: Callable[[], dict[str, Any]], terms: Terms | None = None) -> list[dict[str, Any]]:
        """Run a step of the set-up on this rank and exchange its result with all ranks.

        Raises:
            IpcUnavailableError: The step failed on some rank; every rank raises the first rank's reason.
        """
        host = self._host
        return share(host.collectives, host.membership.names, step, terms or Terms.within(_SET_UP, STEP_S))

    def _hello(self) -> dict[str, Any]:
        return {
            "error": self._runtime.missing(),
            "uuid": self._runtime.uuid(),
            "chunk": knobs.device_chunk_bytes(),
            "one_pass": knobs.device_one_pass_bytes(),
            "by_leader": knobs.device_reduces_by_leader(),
            "nccl": ProcessGroupNCCL is not None,
        }

    def _group(self, infos: list[dict[str, Any]]) -> Membership:
        """Group the ranks by the device that they share; ranks of different hosts never share one."""
        host = self._host.membership
        host_of = {rank: index for index, members in enumerate(host.hosts) for rank in members}
        devices = group_by_host([f"{host_of[rank]}/{info['uuid']}" for rank, info in enumerate(infos)])
        if len(devices) == len(infos) > 1 and not all(info["nccl"] for info in infos):
            raise IpcUnavailableError("no two ranks share a device, and NCCL is not there to connect devices")
        return Membership(self._rank, devices, host.names)

    def _allocate(self, membership: Membership, own: int, chunk_bytes: int) -> DeviceParts:
        """Allocate this rank's block, with the largest half, quarter, ... of the chunk size that every device has."""
        members = membership.local_ranks
        while True:
            sizes = [block_bytes(chunk_bytes, len(members), r == LEADER) for r in range(len(members))]
            parts = DeviceParts(chunk_bytes, sizes, [None] * len(members), [[] for _ in members])
            try:
                answers = self._share(partial(self._allocate_block, parts, own))
            except IpcUnavailableError:
                parts.free_own(self._runtime, own)
                raise
            if not any(answer["short"] for answer in answers):
                return parts
            parts.free_own(self._runtime, own)
            chunk_bytes = chunk_bytes // 2 // 4096 * 4096
            if chunk_bytes < knobs.MIN_CHUNK_BYTES:
                raise IpcUnavailableError("there is not enough free device memory even for small slots")

    def _allocate_block(self, parts: DeviceParts, own: int) -> dict[str, Any]:
        free_retired()
        try:
            try:
                parts.blocks[own] = self._runtime.allocate(parts.sizes[own])
            except MemoryError:
                self._runtime.trim()
                parts.blocks[own] = self._runtime.allocate(parts.sizes[own])
        except MemoryError:
            return {"short": True}
        return {"short": False}

    def _connect(self, membership: Membership, parts: DeviceParts, own: int) -> Arena:
        """Map the other ranks' blocks, events and the device's control page."""
        members = membership.local_ranks
        arena: Arena | None = None
        with contextlib.ExitStack() as stack:

            def export() -> dict[str, Any]:
                nonlocal arena
                message = self._export(parts, own)
                if own == LEADER:
                    arena, name = create_arena(control_bytes(len(members)))
                    stack.callback(os.close, name.fd)
                    message["arena"] = asdict(name)
                return message

            answers = self._share(export)

            def attach() -> dict[str, Any]:
                nonlocal arena
                if arena is None:
                    arena = attach_arena(ArenaName(**answers[members[LEADER]]["arena"]))
                self._open(parts, own, [answers[rank] for rank in members])
                return {}

            self._share(attach)
        assert arena is not None
        return arena

    def _export(self, parts: DeviceParts, own: int) -> dict[str, Any]:
        block = parts.blocks[own]
        assert block is not None
        events = [self._runtime.new_shared_event() for _ in (0, 1)]
        for event in events:
            # An event has a handle only once it has been recorded.
            event.record(self._stream.stream)
        parts.events[own] = events
        handles = [self._runtime.export_event(event).hex() for event in events]
        return {"block": self._runtime.export(block).hex(), "events": handles}

    def _open(self, parts: DeviceParts, own: int, answers: list[dict[str, Any]]) -> None:
        for r, answer in enumerate(answers):
            if r != own:
                parts.blocks[r] = self._runtime.open(bytes.fromhex(answer["block"]), parts.sizes[r])
                parts.events[r] = [self._runtime.open_event(bytes.fromhex(text)) for text in answer["events"]]

    def _start(self, membership: Membership, parts: DeviceParts, arena: Arena, settings: dict[str, Any]) -> DeviceLane:
        """Make the collectives, try them, connect the devices."""
        host, members = self._host.membership, membership.local_ranks
        own = members.index(self._rank)
        host_waiter = self._host.local.engine.waiter
        there = {r: host.local_ranks.index(rank) for r, rank in enumerate(members)}

        peers = [host_waiter.peers[there[r]] for r in range(len(members))]
        memory = DeviceMemory(self._runtime, self._stream.stream, parts, own)
        engine = Engine(arena, own, peers, [host.names[rank] for rank in members], memory)
        local = LocalCollectives(engine, ReductionPlan(settings["one_pass"], 2, settings["by_leader"]))

        def check() -> dict[str, Any]:
            check_collectives(local, self._stream, STEP_S / 2)
            return {}

        self._share(check)
        collectives, leaders = self._connect_devices(membership, local)
        # From here on a failure in either memory ends the group.
        back = {host_rank: r for r, host_rank in there.items()}
        engine.waiter.beside = Beside(host_waiter, there)
        host_waiter.beside = Beside(engine.waiter, back)
        engine.on_failure.append(self._host.local.engine.fail)
        logger.log(
            logging.INFO if self._rank == 0 else logging.DEBUG,
            "ipc device memory for %d ranks on %d devices, chunks of %d bytes",
            self._host.collectives.num_ranks,
            len(membership.hosts),
            memory.chunk_bytes,
        )
        return DeviceLane(local, memory, collectives, leaders)

    def _connect_devices(self, membership: Membership, local: LocalCollectives) -> tuple[Collectives, tuple[Any, ...]]:
        if len(membership.hosts) == 1:
            return local, ()
        store = PrefixStore("device", self._host.store)
        gloo = nccl = None

        def connect_gloo() -> dict[str, Any]:
            nonlocal gloo
            gloo = gloo_leaders(store, membership, self._timeout)
            return {"nccl": ProcessGroupNCCL is not None}

        def connect_nccl() -> dict[str, Any]:
            nonlocal nccl
            # NCCL may refuse what it finds between the devices; Gloo then moves the leaders' data.
            with contextlib.suppress(RuntimeError):
                nccl = nccl_leaders(store, membership, self._timeout, self._stream, STEP_S / 2)
                return {"works": True}
            return {"works": False}

        has_nccl = all(answer["nccl"] for answer in self._share(connect_gloo))
        has_nccl = has_nccl and all(answer["works"] for answer in self._share(connect_nccl))
        data = nccl if has_nccl else gloo
        collectives = HierarchicalCollectives(membership, local, data, self._host.gloo, agreement=gloo)
        return collectives, tuple(group for group in (nccl, gloo) if group is not None)


def check_collectives(local: LocalCollectives, stream: CommunicationStream, patience_s: float) -> None:
    """Map every peer's slots, wait for every peer's events, compare exactly.

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
    reduced = torch.Size([min(local.plan.one_pass_bytes, local.engine.transport.chunk_bytes) // 4 + 1])
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


def nccl_leaders(
    store: Any, membership: Membership, timeout: timedelta, stream: CommunicationStream, patience_s: float
) -> Any:
    """Create the NCCL group between the leaders and check a sum; None where `gloo_leaders` returns None.

    Args:
        store: The group's store.
        membership: Ranks of each device, so that no two leaders share one, which NCCL would refuse.
        timeout: Time limit of its collectives.
        stream: Where to try it.
        patience_s: Seconds until the trial counts as failed.

    Raises:
        RuntimeError: NCCL cannot connect the leaders, or adds up wrong.
    """
    if not leads(membership):
        return None
    runtime, size = stream.runtime, len(membership.hosts)
    group = ProcessGroupNCCL(PrefixStore("ipc-nccl-leaders", store), membership.host_index, size, timeout)
    with runtime.on(stream.stream):
        ones = torch.ones(1024, device=runtime.device)
        group.allreduce([ones]).wait()
        done = runtime.new_event()
        done.record(stream.stream)
    try:
        wait_on_host(done, patience_s)
        if not bool((ones.cpu() == size).all()):
            raise RuntimeError("NCCL added up wrong")
    except RuntimeError:
        # The stream waits for it, and so would all that is given to the stream later.
        stop([group], "abort")
        raise
    return group
