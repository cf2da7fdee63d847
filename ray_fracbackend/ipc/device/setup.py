"""Brings a group's device memory together, at its first call with CUDA tensors. Runs in every rank; imports torch.

The ranks talk through the host memory that they share already, so a rank that dies or never comes is noticed as in any
other call. After each step everybody tells everybody whether it worked; if it did not somewhere, all ranks give up with
the same reason, and Gloo carries the group's CUDA tensors from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from .. import knobs
from .._torch import PrefixStore, ProcessGroupNCCL
from ..errors import IpcError, IpcUnavailableError
from ..host.arena import Arena, ArenaName, attach_arena, create_arena
from ..host.transport import Transport
from ..protocol.control import control_bytes
from ..protocol.description import describe_call, description_text, first_on_device
from ..protocol.hierarchy import HierarchicalCollectives
from ..protocol.leaders import gloo_leaders, nccl_leaders
from ..protocol.local import LEADER, LocalCollectives, ReductionPlan
from ..protocol.setup import Membership, group_by_host, make_engine
from ..protocol.waiting import Beside, Waiter
from .check import check_collectives
from .memory import DeviceMemory, DeviceParts, block_bytes, free_retired, give_up
from .streams import CommunicationStream

# Seconds for each step once all ranks have come. Some steps wait until the device is idle.
STEP_S = 60.0
_MESSAGE_BYTES = 4096
_MAX_ERROR = 1000

Collectives = LocalCollectives | HierarchicalCollectives


@dataclass(frozen=True)
class HostSide:
    """What a group has before it has device memory.

    Attributes:
        membership: Ranks of each host.
        local: Collectives of this rank's host.
        collectives: Collectives of the group.
        gloo: The Gloo group of all ranks.
        store: The group's store.
    """

    membership: Membership
    local: LocalCollectives
    collectives: Collectives
    gloo: Any
    store: Any


@dataclass(frozen=True)
class DeviceLane:
    """What a group has once its device memory works.

    Attributes:
        membership: Ranks of each device.
        local: Collectives of this rank's device.
        memory: Their transport.
        collectives: Collectives of the group.
        leaders: Groups between the leaders, to be ended with this one.
    """

    membership: Membership
    local: LocalCollectives
    memory: DeviceMemory
    collectives: Collectives
    leaders: tuple[Any, ...]


class DeviceSetup:
    """One attempt to set device memory up; every rank of the group makes it in the same call.

    Args:
        host: The group so far.
        stream: The group's stream on this rank's device.
        timeout: Default time limit of the group's collectives.
    """

    def __init__(self, host: HostSide, stream: CommunicationStream, timeout: timedelta) -> None:
        self._host = host
        self._stream = stream
        self._runtime = stream.runtime
        self._timeout = timeout
        self._rank = host.membership.rank
        self._description = describe_call("device memory set-up")

    def run(self, first_call: bytes, timeout_s: float) -> DeviceLane:
        """Set it up.

        Args:
            first_call: Description of the call that needs it.
            timeout_s: Seconds to wait for ranks that have not made this call yet.

        Raises:
            IpcUnavailableError: Device memory cannot be used; every rank raises the same text.
            IpcError: A rank did not come or died; the group is broken.
        """
        infos = self._tell(self._hello(), first_on_device(first_call), timeout_s)
        membership = self._group(infos)
        parts = self._allocate(membership, min(info["chunk"] for info in infos))
        local_rank = membership.local_ranks.index(self._rank)
        try:
            arena = self._connect(membership, parts, local_rank)
        except IpcUnavailableError:
            # Nothing has been issued to the device, so all can be given back.
            parts.close_imports(self._runtime, local_rank)
            self._tell({})
            parts.free_own(self._runtime, local_rank)
            raise
        try:
            return self._start(membership, parts, arena, infos[membership.local_ranks[0]])
        except IpcUnavailableError:
            # The device may be stuck in what was issued: freeing would wait for it.
            give_up()
            raise

    def _tell(
        self, message: dict[str, Any], description: bytes | None = None, timeout_s: float = STEP_S
    ) -> list[dict[str, Any]]:
        """Exchange messages with all ranks; raises the first "error" among them."""
        if message.get("error"):
            message = {"error": str(message["error"])[:_MAX_ERROR]}
        data = json.dumps(message).encode().ljust(_MESSAGE_BYTES, b"\0")
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        table = torch.empty((self._host.collectives.num_ranks, _MESSAGE_BYTES), dtype=torch.uint8, device="cpu")
        self._host.collectives.all_gather(own, list(table), description or self._description, timeout_s)
        answers = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in table]
        for rank, answer in enumerate(answers):
            if answer.get("error"):
                raise IpcUnavailableError(f"{self._host.membership.names[rank]}: {answer['error']}")
        return answers

    def _hello(self) -> dict[str, Any]:
        try:
            return {
                "error": self._runtime.missing(),
                "uuid": self._runtime.uuid(),
                "chunk": knobs.device_chunk_bytes(),
                "one_pass": knobs.device_one_pass_bytes(),
                "by_leader": knobs.device_reduces_by_leader(),
                "nccl": ProcessGroupNCCL is not None,
            }
        except (RuntimeError, ValueError) as error:
            return {"error": error}

    def _group(self, infos: list[dict[str, Any]]) -> Membership:
        """Group the ranks by the device that they share; ranks of different hosts never share one."""
        host = self._host.membership
        host_of = {rank: index for index, members in enumerate(host.hosts) for rank in members}
        devices = group_by_host([f"{host_of[rank]}/{info['uuid']}" for rank, info in enumerate(infos)])
        if len(devices) == len(infos) > 1 and not all(info["nccl"] for info in infos):
            raise IpcUnavailableError("no two ranks share a device, and NCCL is not there to connect devices")
        return Membership(self._rank, devices, host.names)

    def _allocate(self, membership: Membership, chunk_bytes: int) -> DeviceParts:
        """This rank's block, with the largest half, quarter, ... of the wanted chunk size that every device has."""
        members = membership.local_ranks
        while True:
            sizes = [block_bytes(chunk_bytes, len(members), r == LEADER) for r in range(len(members))]
            parts = DeviceParts(chunk_bytes, sizes, [None] * len(members), [[] for _ in members])
            own = members.index(self._rank)
            answer: dict[str, Any] = {"short": False}
            try:
                free_retired()
                parts.blocks[own] = self._allocate_block(sizes[own])
            except MemoryError:
                answer = {"short": True}
            except RuntimeError as error:
                answer = {"error": error}
            try:
                answers = self._tell(answer)
            except IpcUnavailableError:
                parts.free_own(self._runtime, own)
                raise
            if not any(a["short"] for a in answers):
                return parts
            parts.free_own(self._runtime, own)
            chunk_bytes = chunk_bytes // 2 // 4096 * 4096
            if chunk_bytes < knobs.MIN_CHUNK_BYTES:
                raise IpcUnavailableError("there is not enough free device memory even for small slots")

    def _allocate_block(self, num_bytes: int) -> Any:
        try:
            return self._runtime.allocate(num_bytes)
        except MemoryError:
            self._runtime.trim()
            return self._runtime.allocate(num_bytes)

    def _connect(self, membership: Membership, parts: DeviceParts, own: int) -> Arena:
        """Map the other ranks' blocks, events and the device's control page."""
        members = membership.local_ranks
        with contextlib.ExitStack() as stack:
            arena: Arena | None = None
            try:
                message = self._export(parts, own)
                if own == LEADER:
                    arena, name = create_arena(control_bytes(len(members)))
                    stack.callback(os.close, name.fd)
                    message["arena"] = asdict(name)
            except (RuntimeError, OSError) as error:
                message = {"error": error}
            answers = self._tell(message)
            error_text: Any = None
            try:
                if arena is None:
                    arena = attach_arena(ArenaName(**answers[members[LEADER]]["arena"]))
                self._open(parts, own, [answers[rank] for rank in members])
            except (RuntimeError, OSError) as error:
                error_text = error
            self._tell({"error": error_text})
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
        memory: DeviceMemory | None = None

        def make_memory(waiter: Waiter) -> Transport:
            nonlocal memory
            memory = DeviceMemory(
                self._runtime, self._stream.stream, parts, own, waiter.release_fence, waiter.acquire_fence
            )
            return memory

        peers = [host_waiter.peers[there[r]] for r in range(len(members))]
        engine = make_engine(arena, own, peers, [host.names[rank] for rank in members], make_memory)
        plan = ReductionPlan(settings["one_pass"], 2, settings["by_leader"])
        local = LocalCollectives(engine, plan)
        error: Any = None
        try:
            check_collectives(local, self._stream, STEP_S / 2)
        except (RuntimeError, ValueError) as failure:
            error = failure
        self._tell({"error": error})
        assert memory is not None
        collectives, leaders = self._connect_devices(membership, local)
        # From here on a failure in either memory ends the group.
        back = {host_rank: r for r, host_rank in there.items()}
        engine.waiter.beside = Beside(host_waiter, there, description_text)
        host_waiter.beside = Beside(engine.waiter, back, description_text)
        engine.on_failure.append(self._host.local.engine.fail)
        return DeviceLane(membership, local, memory, collectives, leaders)

    def _connect_devices(self, membership: Membership, local: LocalCollectives) -> tuple[Collectives, tuple[Any, ...]]:
        if len(membership.hosts) == 1:
            return local, ()
        store = PrefixStore("device", self._host.store)
        error: Any = None
        gloo = nccl = None
        try:
            gloo = gloo_leaders(store, membership, self._timeout)
        except IpcError as failure:
            error = failure
        has_nccl = all(a["nccl"] for a in self._tell({"error": error, "nccl": ProcessGroupNCCL is not None}))
        if has_nccl:
            try:
                nccl = nccl_leaders(store, membership, self._timeout, self._stream, STEP_S / 2)
            except RuntimeError as failure:
                error = failure
            # NCCL may refuse what it finds between the devices; Gloo then moves the leaders' data.
            has_nccl = all(a["works"] for a in self._tell({"works": error is None}))
        data = nccl if has_nccl else gloo
        collectives = HierarchicalCollectives(membership, local, data, self._host.gloo, agreement=gloo)
        return collectives, tuple(group for group in (nccl, gloo) if group is not None)
