"""Every accelerated collective as one call on a bare process group, for tests that inject faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ipc_harness import Job
from torch._C import _distributed_c10d as c10d

from ray_fracbackend.ipc import IpcProcessGroup
from ray_fracbackend.ipc.schedule import Action

# Four of the 64 KiB chunks that these tests use, and a bit.
NUMEL = 66_000


def bare_group(
    job: Job, name: str, rank: int, size: int, timeout_s: float, ranks: tuple[int, ...] = ()
) -> IpcProcessGroup:
    """A process group without ``init_process_group``, over the run's store."""
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=60))
    return IpcProcessGroup(dist.PrefixStore(name, store), rank, size, timedelta(seconds=timeout_s), ranks)


def options(kind: str, **fields: Any) -> Any:
    """Options of a synchronous call."""
    made = getattr(c10d, f"{kind}Options")()
    for name, value in {"asyncOp": False, **fields}.items():
        if hasattr(made, name):
            setattr(made, name, value)
    return made


def filled(numel: int = NUMEL) -> torch.Tensor:
    """Any data."""
    return torch.ones(numel)


def several(pg: IpcProcessGroup) -> list[torch.Tensor]:
    """One tensor for each rank."""
    return [filled() for _ in range(pg.size())]


def _root_list(pg: IpcProcessGroup) -> list[list[torch.Tensor]]:
    return [several(pg)] if pg.rank() == 0 else []


CALLS: dict[str, Callable[[IpcProcessGroup], Any]] = {
    "all_reduce": lambda pg: pg.allreduce([filled()], options("Allreduce")),
    "all_reduce_small": lambda pg: pg.allreduce([filled(4)], options("Allreduce")),
    "broadcast": lambda pg: pg.broadcast([filled()], options("Broadcast")),
    "reduce": lambda pg: pg.reduce([filled()], options("Reduce")),
    "all_gather": lambda pg: pg.allgather([several(pg)], [filled()], options("Allgather")),
    "all_gather_into_tensor": lambda pg: pg.all_gather_single(
        filled(NUMEL * pg.size()), filled(), options("Allgather")
    ),
    "reduce_scatter": lambda pg: pg.reduce_scatter([filled()], [several(pg)], options("ReduceScatter")),
    "reduce_scatter_tensor": lambda pg: pg.reduce_scatter_single(
        filled(), filled(NUMEL * pg.size()), options("ReduceScatter")
    ),
    "gather": lambda pg: pg.gather(_root_list(pg), [filled()], options("Gather")),
    "scatter": lambda pg: pg.scatter([filled()], _root_list(pg), options("Scatter")),
    "all_to_all": lambda pg: pg.alltoall(several(pg), several(pg), options("AllToAll")),
    "all_to_all_single": lambda pg: pg.all_to_all_single(
        filled(NUMEL * pg.size()), filled(NUMEL * pg.size()), [], [], options("AllToAll")
    ),
    "barrier": lambda pg: pg.barrier(options("Barrier")),
}


def phases(name: str) -> list[Action]:
    """Actions at which a fault can strike this collective with three ranks."""
    folds = name in ("all_reduce", "reduce")
    return [action for action in Action if action is not Action.FOLD or folds]


def strike_at(pg: IpcProcessGroup, action: Action, strike: Callable[[], None]) -> None:
    """Call `strike` when this rank is about to take `action` for the first time."""

    def observer(now: Action, chunk: int) -> None:
        if now is action:
            strike()

    pg._local.engine.observer = observer


def memfd_count() -> int:
    """Mappings of our shared memory in this process."""
    with open("/proc/self/maps") as maps:
        return sum("ray_fracbackend_ipc" in line for line in maps)


def open_memfds() -> int:
    """Descriptors of our shared memory in this process."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += "ray_fracbackend_ipc" in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return count
