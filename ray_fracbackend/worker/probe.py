"""Collect devices and network of one worker. Runs on the worker; creates no process group and no CUDA context.

Ray is imported only by the functions that need it, because the doctor uses the other functions even if Ray cannot be
imported.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from ray_fracbackend import __version__
from ray_fracbackend.decide.rendezvous import AGENT_STORE
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.shown import may_be_secret
from ray_fracbackend.worker.devices import boot_id, described, mps_reachable, worker_devices
from ray_fracbackend.worker.environment import user_environment
from ray_fracbackend.worker.nccl_library import loaded_nccl_version
from ray_fracbackend.worker.network import network_info, node_address
from ray_fracbackend.worker.store import hold_store

_ENV_PREFIXES = ("NCCL_", "GLOO_", "CUDA_MPS", "USE_LIBUV", "TORCH_DISTRIBUTED_DEBUG", AGENT_STORE)


def probe_worker(
    rank: int,
    master_addr: str | None = None,
    master_port: int | tuple[int, int] | None = None,
    one_node: bool = False,
    ask_ipc: bool = False,
    port_wait_s: float = 0.0,
) -> tuple[str, dict[str, Any]]:
    """Collect devices, network and versions of the calling worker; rank 0 also creates the TCPStore of the rendezvous.

    Args:
        rank: The worker's rank in the worker group.
        master_addr: The configured address or name of rank 0's node; a name is resolved here.
        master_port: The configured port of rank 0's store, or an inclusive range.
        one_node: Whether Ray placed all workers on this node.
        ask_ipc: Whether to check what the ipc backend can use here. This imports and registers the backend.
        port_wait_s: Seconds to wait for a configured port that is taken.

    Returns:
        The version of this package here, and the `WorkerInfo` as plain values: the driver may have another version.

    Raises:
        PortInUseError: The configured port, or every port of the range, is taken on rank 0's node.
    """
    info = probe_devices(rank, ask_ipc)
    store_port = hold_store(master_port, one_node and master_addr is None, port_wait_s) if rank == 0 else None
    return __version__, asdict(replace(info, network=network_info(info.boot_id, master_addr, store_port)))


def probe_devices(rank: int, ask_ipc: bool = False) -> WorkerInfo:
    """Collect devices and versions of the calling worker, without its network; create no store.

    Args:
        rank: The worker's rank in the worker group.
        ask_ipc: Whether to check what the ipc backend can use here. This imports and registers the backend.

    Returns:
        Devices and versions of the worker.
    """
    import ray

    context = ray.get_runtime_context()
    resources = context.get_assigned_resources()
    devices, cuda_missing = worker_devices(resources.get("GPU", 0) > 0)
    return collect_info(
        devices,
        ask_ipc,
        rank=rank,
        node_id=context.get_node_id(),
        node_ip=node_address(ray.util.get_node_ip_address()),
        ray_version=ray.__version__,
        resources=dict(resources),
        gpu_ids=tuple(map(str, context.get_accelerator_ids().get("GPU", []))),
        cuda_missing=cuda_missing,
    )


def collect_info(
    devices: list[torch.device], ask_ipc: bool = False, *, env: Mapping[str, str] | None = None, **own: Any
) -> WorkerInfo:
    """Add to the caller's values everything that any process of the machine can collect.

    Args:
        devices: The process's own CUDA devices.
        ask_ipc: Whether to check what the ipc backend can use here.
        env: The user's environment variables; by default the variables that no start has set.
        **own: Further attributes of `WorkerInfo`.
    """
    known, unreadable = described(devices)
    own |= {"cuda_missing": unreadable} if unreadable else {}
    if ask_ipc:
        from ray_fracbackend.ipc import host_memory_support, knobs  # the package registers the backend

        own["ipc_host_memory_missing"] = knobs.invalid_value() or host_memory_support()
    # On Windows staged replaces Gloo if the job has devices.
    if ask_ipc or (sys.platform == "win32" and devices):
        from ray_fracbackend.ipc import knobs
        from ray_fracbackend.staged import staged_support  # registers the backend

        own["staged_missing"] = knobs.invalid_value() or staged_support()
    return WorkerInfo(
        **own,
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        platform=sys.platform,
        torch_version=torch.__version__,
        devices=known,
        num_visible_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        nccl_available=dist.is_nccl_available(),
        nccl_version=loaded_nccl_version(),
        mps_reachable=mps_reachable(),
        env={
            name: value
            for name, value in (env or user_environment()).items()
            if name.startswith(_ENV_PREFIXES) and not may_be_secret(name)
        },
    )
