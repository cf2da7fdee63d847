"""The c10d backend ``ipc``: collectives between ranks of one machine through shared host or device memory.

Importing this package registers the backend; it needs torch on Linux, and not Ray::

    import torch.distributed as dist
    import ray_fracbackend.ipc

    dist.init_process_group("ipc")  # under torchrun

Point-to-point messages, and tensors that shared memory cannot carry, go through an inner Gloo group.

Imports go one way: ``group`` > ``device`` > ``protocol`` > ``host`` > ``knobs``, ``errors``, ``_torch``; never to Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._torch import DEVICES, Backend, is_registered
from .device.driver import device_memory_support
from .errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupPoisonedError,
    IpcError,
    IpcUnavailableError,
    PeerLostError,
)
from .host.support import host_id, host_memory_support

if TYPE_CHECKING:
    from .group.process_group import IpcProcessGroup

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
    "device_memory_support",
    "host_id",
    "host_memory_support",
    "register",
]

BACKEND_NAME = "ipc"


def __getattr__(name: str) -> Any:
    # The collectives are loaded with the first group: a check whether the backend is available does not need them.
    if name != "IpcProcessGroup":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .group.process_group import IpcProcessGroup

    return IpcProcessGroup


def _create(opts: Any, _backend_options: Any = None) -> IpcProcessGroup:
    from .group.process_group import IpcProcessGroup

    return IpcProcessGroup(
        opts.store, opts.group_rank, opts.group_size, opts.timeout, tuple(opts.global_ranks_in_group or ())
    )


def register() -> None:
    """Register the backend ``ipc`` with torch.distributed. Importing the package calls it; further calls do nothing."""
    if not is_registered(BACKEND_NAME):
        Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=list(DEVICES))


register()
