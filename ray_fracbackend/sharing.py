"""Which ranks share a CUDA device, and which NCCL would refuse. Pure functions over WorkerFacts, O(number of workers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_fracbackend.facts import DeviceFacts, NcclVersion, WorkerFacts, ranks_text, version_text

# From this version on NCCL compares GPU UUIDs instead of PCI bus ids (init.cc, ncclCheckMultiRank).
NCCL_COMPARES_UUID: NcclVersion = (2, 30, 7)
# From this version on NCCL takes several ranks on one GPU when NCCL_MULTI_RANK_GPU_ENABLE=1.
NCCL_MULTI_RANK: NcclVersion = (2, 30, 0)
MULTI_RANK_ENV = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True, slots=True)
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


def share_text(groups: tuple[ShareGroup, ...]) -> str:
    """The share map in words, the first three groups of it."""
    shown = ", ".join(group.text for group in groups[:3])
    return shown if len(groups) <= 3 else f"{shown} and {len(groups) - 3} more such groups"


def shared_devices(workers: Sequence[WorkerFacts]) -> tuple[ShareGroup, ...]:
    """Groups of ranks with the same device UUID over the whole job, containers of one host included."""
    return tuple(_group(found, True) for found in _groups(workers, lambda _, device: device.uuid))


def nccl_confusions(workers: Sequence[WorkerFacts]) -> tuple[ShareGroup, ...]:
    """Groups of ranks on different devices that the loaded NCCL takes for one and refuses.

    NCCL compares ranks of equal host hash only (utils.cc): below 2.30.7 by PCI bus id, so that MIG slices of one GPU
    collide, from 2.30.7 on by device UUID. A version that could not be read is taken to be old.
    """
    # One string and no tuple: the collector would go through hundreds of thousands of those on a large job.
    return _different_devices(
        workers, lambda worker, device: f"{worker.nccl_host}\0{_nccl_device(worker.nccl_version, device)}"
    )


def mig_siblings(workers: Sequence[WorkerFacts]) -> tuple[ShareGroup, ...]:
    """Groups of ranks on different MIG slices of one GPU; users report that NCCL may refuse these at any version."""
    if not any(worker.devices and worker.devices[0].is_mig for worker in workers):
        return ()
    return _different_devices(workers, _physical_gpu)


def _physical_gpu(worker: WorkerFacts, device: DeviceFacts) -> str:
    if device.is_mig and device.parent_uuid is None and device.pci_bus_id:  # NVML did not name the parent
        return f"{worker.nccl_host}\0{device.pci_bus_id}"
    return device.parent_uuid or device.uuid


def multi_rank_obstacle(workers: Sequence[WorkerFacts], groups: Sequence[ShareGroup]) -> str | None:
    """Why the user's ``NCCL_MULTI_RANK_GPU_ENABLE=1`` cannot take effect, None where it can.

    It needs the variable on all ranks that share a device, and one NCCL of 2.30 or newer on all workers.

    Args:
        workers: Facts of every rank, in rank order.
        groups: The ranks that share a device.

    Returns:
        The obstacle in a few words.
    """
    sharing = sorted({rank for group in groups for rank in group.ranks})
    missing = [rank for rank in sharing if workers[rank].env.get(MULTI_RANK_ENV) != "1"]
    if missing:
        return f"it is not set on {ranks_text(missing)}"
    versions = {worker.nccl_version if worker.nccl_available else None for worker in workers}
    if len(versions) > 1 or None in versions:
        return "the workers do not all have one version of NCCL"
    if min(version for version in versions if version) < NCCL_MULTI_RANK:
        return f"NCCL {versions_text(workers)} is older than 2.30"
    return None


def versions_text(workers: Sequence[WorkerFacts]) -> str:
    """The NCCL versions of the workers in ascending order, such as ``2.28.9`` or ``2.27.3 and 2.28.9``."""
    found = sorted({worker.nccl_version or (0, 0, 0) for worker in workers})
    return " and ".join(version_text(version if version[0] else None) for version in found)


def _nccl_device(version: NcclVersion | None, device: DeviceFacts) -> str:
    if version is not None and version >= NCCL_COMPARES_UUID:
        return device.uuid
    return device.pci_bus_id or device.parent_uuid or device.uuid


_KeyOf = Callable[[WorkerFacts, DeviceFacts], str]


def _groups(workers: Sequence[WorkerFacts], key_of: _KeyOf) -> list[list[WorkerFacts]]:
    first: dict[str, WorkerFacts] = {}
    # A list for shared devices only: a list each would cost more than all the rest on a job of 100,000 workers.
    members: dict[str, list[WorkerFacts]] = {}
    for worker in workers:
        if not worker.devices:
            continue
        key = key_of(worker, worker.devices[0])
        earlier = first.setdefault(key, worker)
        if earlier is not worker:
            members.setdefault(key, [earlier]).append(worker)
    return list(members.values())


def _different_devices(workers: Sequence[WorkerFacts], key_of: _KeyOf) -> tuple[ShareGroup, ...]:
    """Groups of equal key in which not all ranks sit on one device."""
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
        for found in _groups(workers, key_of)
        if any(w.devices[0].uuid != found[0].devices[0].uuid for w in found)
    )


def _group(members: list[WorkerFacts], same_device: bool) -> ShareGroup:
    return ShareGroup(
        ranks=tuple(worker.rank for worker in members),
        device=members[0].devices[0],
        nodes=tuple(dict.fromkeys(worker.node_ip for worker in members)),
        same_device=same_device,
    )
