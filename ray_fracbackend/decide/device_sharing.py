"""Find ranks that share a CUDA device. O(number of workers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo, ranks_text

KeyOf = Callable[[WorkerInfo, DeviceInfo], str]


@dataclass(frozen=True, slots=True)
class ShareGroup:
    """Ranks on one device, or on MIG slices of one GPU that NCCL treats as one device.

    Attributes:
        ranks: Ranks in ascending order, at least two.
        device: Device of the lowest rank.
        nodes: Addresses of the ranks' nodes, in order of first appearance; with containers there may be several.
        same_device: False if the ranks are on different MIG slices.
    """

    ranks: tuple[int, ...]
    device: DeviceInfo
    nodes: tuple[str, ...]
    same_device: bool

    @property
    def text(self) -> str:
        """``ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.3``."""
        node = f"node{'s' if len(self.nodes) > 1 else ''} {', '.join(self.nodes)}"
        if self.same_device:
            return f"{ranks_text(self.ranks)} share {short_uuid(self.device.uuid)} ({self.device.name}) on {node}"
        parent = short_uuid(self.device.parent_uuid or self.device.pci_bus_id or "one GPU")
        return f"{ranks_text(self.ranks)} use MIG slices of {parent} ({self.device.name}) on {node}"

    def __str__(self) -> str:
        return self.text


def short_uuid(uuid: str) -> str:
    """Shorten a UUID to its first block, unique enough within a job: ``GPU-ab12cd34``."""
    head, _, rest = uuid.partition("-")
    return f"{head}-{rest.partition('-')[0]}" if head in ("GPU", "MIG") and rest else uuid


def share_text(groups: Sequence[ShareGroup]) -> str:
    """Format the first three groups in one line."""
    shown = ", ".join(group.text for group in groups[:3])
    return shown if len(groups) <= 3 else f"{shown} and {len(groups) - 3} more such groups"


def sharing_ranks(groups: Sequence[ShareGroup]) -> list[int]:
    """Return all ranks of the groups in ascending order."""
    return sorted({rank for group in groups for rank in group.ranks})


def shared_devices(workers: Sequence[WorkerInfo]) -> tuple[ShareGroup, ...]:
    """Group ranks by device UUID over the whole job, including containers of one host."""
    return tuple(_group(found, True) for found in _members(workers, lambda _, device: device.uuid))


def different_devices(workers: Sequence[WorkerInfo], key_of: KeyOf) -> tuple[ShareGroup, ...]:
    """Group ranks whose devices have the same key but are not all the same device.

    Args:
        workers: Every rank, in rank order.
        key_of: Returns the key of a worker and its first device. Use a string, not a tuple: in a large job the garbage
            collector would scan hundreds of thousands of tuples.
    """
    uuids: dict[str, str] = {}
    for worker in workers:
        if worker.devices:
            device = worker.devices[0]
            if uuids.setdefault(key_of(worker, device), device.uuid) != device.uuid:
                break
    else:
        return ()
    return tuple(
        _group(found, False)
        for found in _members(workers, key_of)
        if any(w.devices[0].uuid != found[0].devices[0].uuid for w in found)
    )


def _members(workers: Sequence[WorkerInfo], key_of: KeyOf) -> list[list[WorkerInfo]]:
    first: dict[str, WorkerInfo] = {}
    # Create lists only for shared devices: one list per device would cost more than everything else with 100,000
    # workers.
    members: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        if not worker.devices:
            continue
        key = key_of(worker, worker.devices[0])
        earlier = first.setdefault(key, worker)
        if earlier is not worker:
            members.setdefault(key, [earlier]).append(worker)
    return list(members.values())


def _group(members: list[WorkerInfo], same_device: bool) -> ShareGroup:
    return ShareGroup(
        ranks=tuple(worker.rank for worker in members),
        device=members[0].devices[0],
        nodes=tuple(dict.fromkeys(worker.node_ip for worker in members)),
        same_device=same_device,
    )
