"""Functions of the net tests in worker processes: stock Ray Train's start, and ours without Ray."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import torch
import torch.distributed as dist
from ray.train.torch.config import _setup_torch_process_group

from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.ipc import host_memory_support
from ray_fracbackend.worker.devices import boot_id
from ray_fracbackend.worker.environment import user_environment
from ray_fracbackend.worker.network import network_info
from ray_fracbackend.worker.process_group import start_worker
from ray_fracbackend.worker.store import hold_store


def all_reduced() -> float:
    tensor = torch.full((1024,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor[-1].item()


def stock_start(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> float:
    """Run stock Ray Train's own worker function with backend gloo, then one all_reduce."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    _setup_torch_process_group("gloo", rank, world_size, "env://", timeout_s)
    return all_reduced()


def our_probe(
    rank: int, node: str, node_ip: str, master_addr: str | None, master_port: int | tuple[int, int] | None
) -> WorkerInfo:
    """Run the network part of our probe, with Ray's view of the node as argument."""
    facts = WorkerInfo(
        rank=rank,
        node_id=node,
        node_ip=node_ip,
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        torch_version=torch.__version__,
        env={name: value for name, value in user_environment().items() if name.startswith(("GLOO_", "USE_LIBUV"))},
        ipc_host_memory_missing=host_memory_support(),
    )
    store_port = hold_store(master_port) if rank == 0 else None
    return replace(facts, network=network_info(facts.boot_id, master_addr, store_port))


def our_start(instruction: WorkerPlan) -> float:
    """Run our own worker function, then one all_reduce."""
    start_worker(instruction)
    return all_reduced()


_occupied: list[socket.socket] = []


def occupy(port: int) -> int:
    """Listen on a port on all addresses, like another server; 0 selects any port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("0.0.0.0", port))
    listener.listen()
    _occupied.append(listener)
    return listener.getsockname()[1]


def stay_silent(address: str) -> None:
    """Listen at the address of a name server without answering queries."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    _occupied.append(server)
