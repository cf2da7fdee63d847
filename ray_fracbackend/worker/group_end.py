"""Destroy the process groups of a process, in any state and without holding the GIL. Runs on the worker."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ray_fracbackend import _torch
from ray_fracbackend.log import logger
from ray_fracbackend.timeouts import bounded
from ray_fracbackend.verify.collectives import backends_by_device

# Time limit for aborting a failed NCCL group.
ABORT_S = 5.0


def end_process_group(*, failed: bool = False) -> None:
    """Destroy the default process group in any state; peers that wait in it get an error at once.

    Args:
        failed: Whether a collective may still be running. Destroying a group would wait for it, so every backend except
            Gloo is aborted instead. NCCL is always aborted: ncclCommDestroy waits for the other ranks of the node to
            destroy their group, and they may have failed.
    """
    if not dist.is_initialized():
        _torch.reset_group_count()  # otherwise the ranks of the next start would wait under different keys
        return
    try:
        backends = set(backends_by_device().values())
        if "nccl" in backends or (failed and backends != {"gloo"}):
            bounded(_abort, ABORT_S)
        else:
            destroy_process_groups()
    except (RuntimeError, TimeoutError) as error:
        logger.debug("the failed process group did not close cleanly: %s", error)


def destroy_process_groups() -> None:
    """Destroy all process groups of this process, as ``dist.destroy_process_group()`` does.

    Before torch 2.8 destroying a group holds the GIL while it waits for Gloo's threads (pytorch#154976). If one of them
    waits for the GIL to free a tensor of the last operation, the process hangs. Destroying a backend releases the GIL,
    so the groups are destroyed while this function still holds their backends.
    """
    backends = [
        group._get_backend(torch.device(kind))
        for group in _torch.groups()
        for kind, name in backends_by_device(group).items()
        if name == "gloo"
    ]
    try:
        dist.destroy_process_group()
    finally:
        backends.clear()  # an error would keep this frame


def _abort() -> None:
    try:
        (_torch.abort_groups or destroy_process_groups)()
    except RuntimeError:  # a backend that cannot be aborted, such as the Gloo of a pair
        destroy_process_groups()
