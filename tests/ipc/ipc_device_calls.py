"""Accelerated collectives on a device, real or fake, each as one call on a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ipc_calls import Striker, bare_group, options
from ipc_harness import Job, rank_device

from ray_fracbackend.ipc import IpcProcessGroup
from ray_fracbackend.ipc.protocol.engine import Engine
from ray_fracbackend.ipc.protocol.schedule import Action
from tests.processes import wait_until

# Four of the 64 KiB chunks that these tests use, and a little more.
NUMEL = 66_000
# Time for a device that a rank has left with waits.
FREE_S = 20.0


def device_group(
    job: Job, name: str, rank: int, size: int, timeout_s: float, ranks: tuple[int, ...] = ()
) -> IpcProcessGroup:
    """Create a process group and set up its device memory."""
    pg = bare_group(job, name, rank, size, timeout_s, ranks)
    CALLS["all_reduce_small"](pg).wait()  # with torch 2.7 every call without init_process_group is asynchronous
    engine_of(pg)
    return pg


def engine_of(pg: IpcProcessGroup) -> Engine:
    """Return the engine that runs this rank's calls on the device."""
    lane = pg._device_side._lane
    assert lane is not None, pg.staged_reason
    return lane.collectives.engine


def comes_free(pg: Any) -> bool:
    """Return whether all work of this rank's device finishes, whatever happened to the other ranks."""
    events = []
    for stream in pg._device_side._streams.values():
        with stream.runtime.on(stream.stream):
            events.append(stream.runtime.new_event())
            events[-1].record(stream.stream)
    return wait_until(lambda: all(event.query() for event in events), FREE_S)


def filled(numel: int = NUMEL) -> torch.Tensor:
    """Return any data."""
    return torch.ones(numel, device=rank_device())


def several(pg: IpcProcessGroup) -> list[torch.Tensor]:
    """Return one tensor for each rank."""
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
    """Return the actions at which a fault can occur in this collective."""
    return [action for action in Action if action is not Action.FOLD or name == "all_reduce"]


def strike_at(pg: IpcProcessGroup, action: Action, strike: Callable[[], None]) -> None:
    """Call `strike` before this rank takes `action` for the first time, see `Striker`; at the latest in a later call on the host.

    Whether a rank has to wait at all depends on the progress of the others.
    """
    striker = engine_of(pg).observer = Striker((action, 0), strike)

    def on_host(action: Action, chunk: int) -> None:
        # Some calls begin with one on the host, before they sign on the device.
        if action is Action.SIGN and Action.SIGN in striker.seen and not striker.is_over:
            striker.is_over = True
            strike()

    pg._local.engine.observer = on_host
