"""The names of torch.distributed that are private, or typed differently from release to release.

Runs in every rank; imports torch. Checked on torch 2.13; the names are those of 2.4 to 2.15 as far as the published
sources show. Types are given up here, once, instead of in every module.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

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


def is_registered(name: str) -> bool:
    """Whether a backend of this name was registered with torch."""
    return name.upper() in Backend._plugins
