"""What the net tests run in worker processes: stock Ray Train's start, and ours without Ray around it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from ray.train._internal.utils import get_address_and_port
from ray.train.torch.config import _setup_torch_process_group

from ray_fracbackend import store
from ray_fracbackend.environment import user_environment
from ray_fracbackend.facts import WorkerFacts
from ray_fracbackend.network import network_facts
from ray_fracbackend.probe import boot_id
from ray_fracbackend.process_group import StartInstruction, start_worker


def all_reduced() -> float:
    tensor = torch.full((1024,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor[-1].item()


def stock_address() -> tuple[str, int]:
    """What stock Ray Train picks on rank 0."""
    return get_address_and_port()


def stock_start(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> float:
    """Stock Ray Train's own worker function with backend gloo, then one all_reduce."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    _setup_torch_process_group("gloo", rank, world_size, "env://", timeout_s)
    return all_reduced()


def our_probe(
    rank: int, node: str, node_ip: str, master_addr: str | None, master_port: int | tuple[int, int] | None
) -> WorkerFacts:
    """The network part of our probe, with Ray's view of the node given."""
    port = store.hold_store(master_port) if rank == 0 else None
    return WorkerFacts(
        rank=rank,
        node_id=node,
        node_ip=node_ip,
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        torch_version=torch.__version__,
        env={name: value for name, value in user_environment().items() if name.startswith(("GLOO_", "USE_LIBUV"))},
        network=network_facts(boot_id(), master_addr, port),
    )


def our_start(instruction: StartInstruction) -> float:
    """Our own worker function, then one all_reduce."""
    start_worker(instruction)
    return all_reduced()


def our_start_verified(instruction: StartInstruction) -> Any:
    return start_worker(replace(instruction, verify=True))


def gloo_env() -> str | None:
    return os.environ.get("GLOO_SOCKET_IFNAME")


def leave() -> None:
    dist.destroy_process_group()


_occupied: list[socket.socket] = []


def occupy(port: int) -> int:
    """Takes a port on all addresses, as a foreign server would; 0 takes any."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("0.0.0.0", port))
    listener.listen()
    _occupied.append(listener)
    return listener.getsockname()[1]


def occupy_after_the_choice() -> None:
    """From now on somebody else takes the first port that our store found free, before the store binds it."""
    ask, stolen = store._taken, []

    def taken(port: int) -> str:
        answer = ask(port)
        if not answer and not stolen:
            stolen.append(occupy(port))
        return answer

    store._taken = taken


def stolen_port() -> int:
    return _occupied[0].getsockname()[1]
