"""The names of torch.distributed that are private, or typed differently from release to release.

Runs in every rank; imports torch. Checked on torch 2.13; the names are those of 2.4 to 2.15 as far as the published
sources show. Types are given up here, once, instead of in every module.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

# For what tensors torch takes the backend: of a group that claims CUDA it uses CUDA, also where it has none.
DEVICES: tuple[str, ...] = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)  # type: ignore[no-untyped-call]
# Option classes of the collectives (AllreduceOptions and so on) are public nowhere else.
c10d: Any = _distributed_c10d
Backend: Any = dist.Backend
ProcessGroup: Any = dist.ProcessGroup
# None where torch was built without Gloo (Windows on ARM, some custom builds).
ProcessGroupGloo: Any = getattr(dist, "ProcessGroupGloo", None)
# None where torch was built without NCCL.
ProcessGroupNCCL: Any = getattr(dist, "ProcessGroupNCCL", None)
ReduceOp: Any = dist.ReduceOp
RedOpType: Any = dist.ReduceOp.RedOpType
Work: Any = dist.Work
PrefixStore: Any = _distributed_c10d.PrefixStore
TCPStore: Any = _distributed_c10d.TCPStore


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the default time limit of a Gloo group, under the name that this torch has for it."""
    for name in ("set_timeout", "_set_default_timeout"):
        if hasattr(group, name):
            getattr(group, name)(timeout)
            break


def is_registered(name: str) -> bool:
    """Whether a backend of this name was registered with torch."""
    return name.upper() in Backend._plugins
