"""Build workers and devices for tests."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo

H200 = "NVIDIA H200"


def gpu(name: str = "a", **facts: Any) -> DeviceInfo:
    """Return a whole GPU; devices with equal names are one device."""
    known = {
        "uuid": f"GPU-{name}",
        "name": H200,
        "pci_bus_id": f"00000000:{name}:00.0",
        "total_memory_bytes": 141 << 30,
    }
    return DeviceInfo(**{**known, **facts})


def mig(name: str, parent: str = "a", **facts: Any) -> DeviceInfo:
    """Return a MIG slice of a GPU: its own UUID and the bus id of its parent."""
    known = {
        "uuid": f"MIG-{name}",
        "name": f"{H200} MIG 1g.18gb",
        "parent_uuid": f"GPU-{parent}",
        "total_memory_bytes": 18 << 30,
    }
    return DeviceInfo(**{**known, "pci_bus_id": f"00000000:{parent}:00.0", **facts})


def worker(rank: int, device: DeviceInfo | None = None, node: str = "1", **facts: Any) -> WorkerInfo:
    """Return a worker with half of its device, or a CPU worker."""
    defaults: dict[str, Any] = {
        "rank": rank,
        "node_id": f"node{node}",
        "node_ip": f"10.0.0.{node}",
        "hostname": f"host{node}",
        "boot_id": f"boot{node}",
        "resources": {"CPU": 1.0, "GPU": 0.5} if device else {"CPU": 1.0},
        "devices": (device,) if device else (),
        "num_visible_devices": 1 if device else 0,
        "nccl_available": device is not None,
        "nccl_version": (2, 28, 9) if device else None,
        "ipc_host_memory_missing": "no ipc here",
        "staged_missing": None,
    }
    return WorkerInfo(**{**defaults, **facts})


def job(*devices: DeviceInfo | None, **facts: Any) -> list[WorkerInfo]:
    """Return one worker per device, in rank order, all on one node."""
    return [worker(rank, device, **facts) for rank, device in enumerate(devices)]


def worker_plan(**facts: Any) -> WorkerPlan:
    """Return the plan of rank 0 of two workers on the CPU of this machine."""
    defaults: dict[str, Any] = {"rank": 0, "world_size": 2, "backend": "gloo", "device": "cpu", "attempt": "first"}
    defaults |= {"master_addr": "127.0.0.1", "master_port": 1, "timeout_s": 1800, "budget_s": 60, "verify": True}
    return WorkerPlan(**{**defaults, **facts})


def num_calls(function: Callable[..., Any], *args: Any) -> int:
    """Return how many functions a call runs, which measures its work better than its time."""
    profile = cProfile.Profile()
    profile.runcall(function, *args)
    return sum(entry.callcount for entry in profile.getstats())
