"""Accelerated collectives on a device, real or fake, each as one call on a bare process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ipc_calls import bare_group, options
from ipc_harness import Job, rank_device

from ray_fracbackend.ipc import IpcProcessGroup
from ray_fracbackend.ipc.protocol.engine import Engine
from ray_fracbackend.ipc.protocol.schedule import Action

# Four of the 64 KiB chunks that these tests use, and a bit.
NUMEL = 66_000


def device_group(
    job: Job, name: str, rank: int, size: int, timeout_s: float, ranks: tuple[int, ...] = ()
) -> IpcProcessGroup:
    """A bare process group whose device memory has been set up."""
    pg = bare_group(job, name, rank, size, timeout_s, ranks)
    CALLS["all_reduce_small"](pg).wait()  # with torch 2.7 every call of a bare group is asynchronous
    engine_of(pg)
    return pg


def engine_of(pg: IpcProcessGroup) -> Engine:
    """The engine that runs this rank's calls on the device."""
    lane = pg._device_side._lane
    assert lane is not None, pg.staged_reason
    return lane.collectives.engine


def filled(numel: int = NUMEL) -> torch.Tensor:
    """Any data."""
    return torch.ones(numel, device=rank_device())


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
    """Actions at which a fault can strike this collective."""
    return [action for action in Action if action is not Action.FOLD or name == "all_reduce"]


def strike_at(pg: IpcProcessGroup, action: Action, strike: Callable[[], None]) -> None:
    """Call `strike` when this rank is about to take `action` for the first time."""

    def observer(now: Action, chunk: int) -> None:
        if now is action:
            strike()

    engine_of(pg).observer = observer
