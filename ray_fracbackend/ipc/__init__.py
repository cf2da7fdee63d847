"""The c10d backend ``ipc``: collectives between ranks of one machine through shared memory.

Importing this package registers the backend; it needs torch on Linux, and not Ray::

    import torch.distributed as dist
    import ray_fracbackend.ipc

    dist.init_process_group("ipc")  # under torchrun

Ranks on other machines, and tensors that shared memory does not carry, go through a Gloo group inside it.
"""

from __future__ import annotations

from typing import Any

from .errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupPoisonedError,
    IpcError,
    IpcUnavailableError,
    PeerLostError,
)
from .operations import IpcProcessGroup
from .support import host_memory_support, place_id
from .torch_compat import Backend, is_registered

__all__ = [
    "BACKEND_NAME",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupClosedError",
    "GroupPoisonedError",
    "IpcError",
    "IpcProcessGroup",
    "IpcUnavailableError",
    "PeerLostError",
    "host_memory_support",
    "place_id",
    "register",
]

BACKEND_NAME = "ipc"


def _create(opts: Any, _backend_options: Any = None) -> IpcProcessGroup:
    return IpcProcessGroup(
        opts.store, opts.group_rank, opts.group_size, opts.timeout, tuple(opts.global_ranks_in_group or ())
    )


def register() -> None:
    """Register the backend ``ipc`` with torch.distributed; importing this package does it. May be called again."""
    if not is_registered(BACKEND_NAME):
        Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


register()
