"""Which ranks share a CUDA device, and which NCCL would refuse. Pure functions over WorkerFacts, O(number of workers)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ray_fracbackend.facts import DeviceFacts, NcclVersion, WorkerFacts, ranks_text

# From this version on NCCL compares GPU UUIDs instead of PCI bus ids (init.cc, ncclCheckMultiRank).
NCCL_COMPARES_UUID: NcclVersion = (2, 30, 7)
# From this version on NCCL takes several ranks on one GPU when NCCL_MULTI_RANK_GPU_ENABLE=1.
NCCL_MULTI_RANK: NcclVersion = (2, 30, 0)


@dataclass(frozen=True)
class ShareGroup:
    """Ranks that sit on one device, or on MIG slices of one GPU that NCCL takes for one device.

    Attributes:
        ranks: Ranks in ascending order, at least two.
        device: The device of the lowest of them.
        nodes: Addresses of the nodes that they run on, in order of first appearance; more than one for containers.
        same_device: False where the ranks sit on different MIG slices.
    """

    ranks: tuple[int, ...]
    device: DeviceFacts
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


def short_uuid(uuid: str) -> str:
    """The UUID up to its first block, enough to tell devices of one job apart: ``GPU-ab12cd34``."""
    head, _, rest = uuid.partition("-")
    return f"{head}-{rest.partition('-')[0]}" if head in ("GPU", "MIG") and rest else uuid


def shared_devices(workers: Sequence[WorkerFacts]) -> tuple[ShareGroup, ...]:
    """Groups of ranks with the same device UUID over the whole job, containers of one host included."""
    return _groups(workers, lambda _, device: device.uuid)


def nccl_refusals(workers: Sequence[WorkerFacts]) -> tuple[ShareGroup, ...]:
    """Groups of ranks that the loaded NCCL itself takes for duplicates.

    NCCL compares ranks of equal host hash only (utils.cc): below 2.30.7 by PCI bus id, so that MIG slices of one GPU
    collide, from 2.30.7 on by device UUID. A version that could not be read is taken to be old.
    """
    return _groups(workers, lambda worker, device: (worker.nccl_host, _nccl_device(worker.nccl_version, device)))


def mig_siblings(workers: Sequence[WorkerFacts]) -> tuple[ShareGroup, ...]:
    """Groups of ranks on different MIG slices of one GPU; users report that NCCL may refuse these at any version."""
    groups = _groups(workers, lambda _, device: device.parent_uuid or device.uuid)
    return tuple(group for group in groups if not group.same_device)


def _nccl_device(version: NcclVersion | None, device: DeviceFacts) -> str:
    if version is not None and version >= NCCL_COMPARES_UUID:
        return device.uuid
    return device.pci_bus_id or device.parent_uuid or device.uuid


def _groups(
    workers: Sequence[WorkerFacts], key_of: Callable[[WorkerFacts, DeviceFacts], Hashable]
) -> tuple[ShareGroup, ...]:
    members: dict[Hashable, list[WorkerFacts]] = defaultdict(list)
    for worker in workers:
        if worker.device is not None:
            members[key_of(worker, worker.device)].append(worker)
    return tuple(_group(found) for found in members.values() if len(found) > 1)


def _group(members: list[WorkerFacts]) -> ShareGroup:
    devices = [worker.device for worker in members if worker.device is not None]
    return ShareGroup(
        ranks=tuple(sorted(worker.rank for worker in members)),
        device=devices[0],
        nodes=tuple(dict.fromkeys(worker.node_ip for worker in members)),
        same_device=len({device.uuid for device in devices}) == 1,
    )
