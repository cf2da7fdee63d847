"""Find ranks that share a CUDA device, in O(number of workers), and how many workers can share one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo, ranks_text

KeyOf = Callable[[WorkerInfo, DeviceInfo], str]
# Ray counts resources in ten-thousandths.
RESOURCE_UNIT = 1e-4


def workers_per_gpu(fraction: float) -> int:
    """Return how many workers with this fraction, above 0 and below 1, fit on one GPU."""
    return math.floor((1 + RESOURCE_UNIT / 2) / fraction)


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
    return _groups(workers, lambda _, device: device.uuid)


def different_devices(workers: Sequence[WorkerInfo], key_of: KeyOf) -> tuple[ShareGroup, ...]:
    """Group ranks whose devices have the same key but are not all the same device.

    Args:
        workers: Every rank, in rank order.
        key_of: Returns the key of a worker and its first device.
    """
    return tuple(group for group in _groups(workers, key_of) if not group.same_device)


def _groups(workers: Sequence[WorkerInfo], key_of: KeyOf) -> tuple[ShareGroup, ...]:
    by_key: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        if worker.devices:
            by_key.setdefault(key_of(worker, worker.devices[0]), []).append(worker)
    return tuple(
        ShareGroup(
            ranks=tuple(worker.rank for worker in found),
            device=found[0].devices[0],
            nodes=tuple(dict.fromkeys(worker.node_ip for worker in found)),
            same_device=len({worker.devices[0].uuid for worker in found}) == 1,
        )
        for found in by_key.values()
        if len(found) > 1
    )
