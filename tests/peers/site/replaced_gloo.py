"""Replace torch's functions about Gloo that its tests use by versions for ``ipc``. Imports torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

# The first group of a process would import it: the tests' processes are forked from one that has imported it.
from ray_fracbackend.ipc import IpcProcessGroup

# Groups that name no backend.
dist.Backend.default_device_backend_map["cpu"] = "ipc"


def group(store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
    """Same call as ``ProcessGroupGloo(...)``."""
    limit = timeout or getattr(options, "_timeout", None) or timedelta(seconds=50)
    return IpcProcessGroup(store, rank, size, limit, ())
