"""NCCL's rules for ranks on one GPU: which it refuses in which version, and the flags of 2.30 for several ranks.

Several ranks on one GPU are experimental in NCCL, since 2.30. Every rank uses its own channels; if there are not enough
resources for all, NCCL hangs. Sources: init.cc, utils.cc and env.rst of the release tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_fracbackend.decide.device_sharing import ShareGroup, different_devices, sharing_ranks
from ray_fracbackend.decide.worker_info import DeviceInfo, NcclVersion, WorkerInfo, ranks_text, version_text

# From this version on NCCL compares GPU UUIDs instead of PCI bus ids (init.cc, ncclCheckMultiRank).
NCCL_COMPARES_UUID: NcclVersion = (2, 30, 7)
# From this version on NCCL accepts several ranks on one GPU if NCCL_MULTI_RANK_GPU_ENABLE=1.
NCCL_MULTI_RANK: NcclVersion = (2, 30, 0)
MULTI_RANK_ENV = "NCCL_MULTI_RANK_GPU_ENABLE"
NCCL_IFNAME = "NCCL_SOCKET_IFNAME"
# CTAs for all ranks of a device together: NCCL's documentation says that its defaults are enough for two ranks.
_CTAS_PER_DEVICE = 8


def versions_text(workers: Sequence[WorkerInfo]) -> str:
    """Format the NCCL versions of the workers in ascending order, such as ``2.28.9`` or ``2.27.3 and 2.28.9``."""
    found = sorted({worker.nccl_version or (0, 0, 0) for worker in workers})
    return " and ".join(version_text(version if version[0] else None) for version in found)


def nccl_conflicts(workers: Sequence[WorkerInfo]) -> tuple[ShareGroup, ...]:
    """Group ranks on different devices that the loaded NCCL treats as one and refuses.

    NCCL compares only ranks with the same host hash (utils.cc). Below 2.30.7 it compares PCI bus ids, so MIG slices of
    one GPU collide; from 2.30.7 on it compares device UUIDs. An unknown version counts as old.
    """
    return different_devices(workers, lambda worker, device: f"{worker.nccl_host}\0{_compared(worker, device)}")


def _compared(worker: WorkerInfo, device: DeviceInfo) -> str:
    if (worker.nccl_version or (0,)) >= NCCL_COMPARES_UUID:
        return device.uuid
    return device.pci_bus_id or device.parent_uuid or device.uuid


def mig_siblings(workers: Sequence[WorkerInfo]) -> tuple[ShareGroup, ...]:
    """Group ranks on different MIG slices of one GPU; users report that NCCL may refuse these in any version."""
    if not any(worker.devices and worker.devices[0].is_mig for worker in workers):
        return ()
    return different_devices(workers, _physical_gpu)


def _physical_gpu(worker: WorkerInfo, device: DeviceInfo) -> str:
    if device.is_mig and device.parent_uuid is None and device.pci_bus_id:  # NVML did not name the parent
        return f"{worker.nccl_host}\0{device.pci_bus_id}"
    return device.parent_uuid or device.uuid


def asks_for_multi_rank(workers: Sequence[WorkerInfo], groups: Sequence[ShareGroup]) -> bool:
    """Return whether the user's ``NCCL_MULTI_RANK_GPU_ENABLE=1`` has an effect.

    It needs the variable on all ranks that share a device, and the same NCCL, 2.30 or newer, on all workers.

    Args:
        workers: Every rank, in rank order.
        groups: Ranks that share a device.
    """
    versions = {worker.nccl_version if worker.nccl_available else None for worker in workers}
    version = versions.pop()
    is_new = not versions and version is not None and version >= NCCL_MULTI_RANK
    return is_new and all(workers[rank].env.get(MULTI_RANK_ENV) == "1" for rank in sharing_ranks(groups))


def multi_rank_env(num_ranks: int, several_nodes: bool = False) -> dict[str, str]:
    """Return the variables that NCCL 2.30 or newer needs for several ranks on one GPU.

    NVLS is disabled explicitly: it is incompatible with several ranks per GPU, and 2.30.7 checks this only on the last
    pair of ranks (init.cc, ``hasMultiRankNvml``).

    Args:
        num_ranks: Number of ranks on the GPU with the most ranks, at least one.
        several_nodes: Whether the job has more than one node.
    """
    env = {MULTI_RANK_ENV: "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": str(max(1, _CTAS_PER_DEVICE // num_ranks))}
    if several_nodes:
        env["NCCL_NET_GDR_LEVEL"] = "LOC"
    return env


def kept_settings(workers: Sequence[WorkerInfo], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return ``NAME=value`` of each variable that the user set to a different value than the plan."""
    return tuple(
        sorted({f"{name}={w.env[name]}" for w in workers for name in env if w.env.get(name, env[name]) != env[name]})
    )


def interface_doubts(workers: Sequence[WorkerInfo]) -> tuple[str, ...]:
    """Return each ``NCCL_SOCKET_IFNAME`` that matches no interface of the rank's node, in one line with the ranks."""
    ranks_of: dict[str, list[int]] = {}
    for worker in workers:
        value, known = worker.env.get(NCCL_IFNAME), list(worker.network.interfaces)
        if value and known and not matching(value, known):
            doubt = f"{NCCL_IFNAME}={value} is kept, but it matches none of this node's interfaces ({', '.join(known)})"
            ranks_of.setdefault(doubt, []).append(worker.rank)
    return tuple(f"{ranks_text(ranks)}: {doubt}" for doubt, ranks in ranks_of.items())


def matching(value: str, known: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL may use: by prefixes, ``=eth0`` by whole names, ``^eth`` all others (NCCL, env.rst)."""
    names = tuple(name for name in value.lstrip("^=").split(",") if name)
    named = [each for each in known if (each in names if "=" in value[:2] else each.startswith(names))]
    return [each for each in known if each not in (*named, "lo")] if value.startswith("^") else named
