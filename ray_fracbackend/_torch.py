"""Private names of torch.distributed that a start uses. ipc/ has its own, in ipc/_torch.py."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]

# Aborts all process groups of this process. torch before 2.6 has no such function; there destroying aborts NCCL.
abort_groups: Callable[[], None] | None = getattr(distributed_c10d, "_abort_process_group", None)

# torch 2.15, and 2.14 if asked, connect NCCL when the group is made, on device LOCAL_RANK unless the group has a device.
CONNECTS_NCCL_AT_ONCE = os.getenv("TORCH_DIST_USE_NCCL2", "1" if torch.__version__ >= "2.15" else "0") != "0"


def default_group() -> dist.ProcessGroup:
    """Return the default process group."""
    return distributed_c10d._get_default_group()


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the store of a process group."""
    return distributed_c10d._get_process_group_store(group)


def groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this process."""
    return list(distributed_c10d._world.pg_map)


def reset_group_count() -> None:
    """Count the groups from 0 again: torch puts the count into the store's keys, and does not decrease it after a failure."""
    distributed_c10d._world.group_count = 0


def set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of the default group's collectives. torch 2.14 has a public function, and a FutureWarning for the old one."""
    getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)(timeout)


def release_frames(error: BaseException | None) -> None:
    """Clear the local variables of all finished calls in the tracebacks of an error and of its causes.

    They reference the group of a failed call, so its peers would continue to wait for this rank. A cleared frame still
    references the closure of its function: such calls have no closures.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
