"""Every accelerated collective as one call on a process group without init_process_group, for tests with faults."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from ipc_harness import Job, rank_backend, rank_device
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from ray_fracbackend.ipc import IpcError, IpcProcessGroup, knobs
from ray_fracbackend.ipc.host.arena import create_arena
from ray_fracbackend.ipc.host.liveness import Peer, start_time
from ray_fracbackend.ipc.protocol import waiting
from ray_fracbackend.ipc.protocol.control import ControlPage, control_bytes
from ray_fracbackend.ipc.protocol.schedule import Action
from ray_fracbackend.staged import StagedProcessGroup
from tests.soak.belongings import shared_memory

CHUNK_BYTES = 64 * 1024
# Below it, so that a call of one chunk can have two passes.
ONE_PASS_BYTES = 32 * 1024
SMALL_CHUNKS = {knobs.CHUNK_BYTES_ENV_VAR: str(CHUNK_BYTES), knobs.ONE_PASS_BYTES_ENV_VAR: str(ONE_PASS_BYTES)}
# Two of these chunks and a little more.
NUMEL = 40_000
SMALL_NUMEL = 4
# Four of the chunks that tests on a device use, and a little more.
DEVICE_NUMEL = 66_000


def bare_group(
    job: Job, name: str, rank: int, size: int, timeout_s: float, ranks: tuple[int, ...] = ()
) -> IpcProcessGroup:
    """Create a process group without ``init_process_group``, over the run's store."""
    store = job.store()
    kind: Any = {"ipc": IpcProcessGroup, "staged": StagedProcessGroup}[rank_backend()]
    return kind(dist.PrefixStore(name, store), rank, size, timedelta(seconds=timeout_s), ranks)


def options(kind: str, **fields: Any) -> Any:
    """Options of a synchronous call."""
    made = getattr(c10d, f"{kind}Options")()
    for name, value in {"asyncOp": False, **fields}.items():
        if hasattr(made, name):
            setattr(made, name, value)
    return made


def filled(numel: int = NUMEL) -> torch.Tensor:
    return torch.ones(numel, device=rank_device())


@dataclass(frozen=True)
class Call:
    """One collective; calling it with a process group starts it and returns its Work.

    Attributes:
        name: Key of `KINDS`.
        numel: Elements of a part, which one rank contributes or receives.
        dtype: Element type.
        op: Name of the reduce operation.
        root: Root rank.
        sparse: Whether its tensor is sparse, so Gloo carries it.
    """

    name: str
    numel: int = NUMEL
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    root: int = 0
    sparse: bool = False

    def __call__(self, pg: IpcProcessGroup, asynchronous: bool = False) -> Any:
        kind, start = KINDS[self.name]
        fields = {"asyncOp": asynchronous, "reduceOp": getattr(dist.ReduceOp, self.op), "rootRank": self.root}
        return start(self, pg, options(kind, **fields))

    def one(self) -> torch.Tensor:
        tensor = torch.ones(self.numel, dtype=self.dtype, device=rank_device())
        return tensor.to_sparse() if self.sparse else tensor

    def whole(self, pg: IpcProcessGroup) -> torch.Tensor:
        """Return a part for each rank, in one tensor."""
        return torch.ones(self.numel * pg.size(), dtype=self.dtype, device=rank_device())

    def several(self, pg: IpcProcessGroup) -> list[torch.Tensor]:
        return [self.one() for _ in range(pg.size())]

    def of_root(self, pg: IpcProcessGroup) -> list[list[torch.Tensor]]:
        """Return a part for each rank on the root, nothing on other ranks."""
        return [self.several(pg)] if pg.rank() == self.root else []

    def reduces(self) -> bool:
        return "reduce" in self.name

    def has_root(self) -> bool:
        return self.name in ("broadcast", "reduce", "gather", "scatter")

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.name == "barrier":
            return self.name
        details = [dtype if self.name.startswith("all_to_all") else f"{dtype}[{self.numel}]"]
        details += [self.op] * self.reduces() + [f"root {self.root}"] * self.has_root()
        return f"{self.name}({', '.join(details)})" + " through Gloo" * self.sparse


# Kind of options, and the function that starts it.
KINDS: dict[str, tuple[str, Callable[[Call, IpcProcessGroup, Any], Any]]] = {
    "all_reduce": ("Allreduce", lambda c, pg, o: pg.allreduce([c.one()], o)),
    "broadcast": ("Broadcast", lambda c, pg, o: pg.broadcast([c.one()], o)),
    "reduce": ("Reduce", lambda c, pg, o: pg.reduce([c.one()], o)),
    "all_gather": ("Allgather", lambda c, pg, o: pg.allgather([c.several(pg)], [c.one()], o)),
    "all_gather_into_tensor": ("Allgather", lambda c, pg, o: pg.all_gather_single(c.whole(pg), c.one(), o)),
    "reduce_scatter": ("ReduceScatter", lambda c, pg, o: pg.reduce_scatter([c.one()], [c.several(pg)], o)),
    "reduce_scatter_tensor": ("ReduceScatter", lambda c, pg, o: pg.reduce_scatter_single(c.one(), c.whole(pg), o)),
    "gather": ("Gather", lambda c, pg, o: pg.gather(c.of_root(pg), [c.one()], o)),
    "scatter": ("Scatter", lambda c, pg, o: pg.scatter([c.one()], c.of_root(pg), o)),
    "all_to_all": ("AllToAll", lambda c, pg, o: pg.alltoall(c.several(pg), c.several(pg), o)),
    "all_to_all_single": (
        "AllToAll",
        lambda c, pg, o: pg.all_to_all_single(c.whole(pg), c.whole(pg), [], [], o),
    ),
    "barrier": ("Barrier", lambda c, pg, o: pg.barrier(o)),
}
CALLS = {name: Call(name) for name in KINDS} | {"all_reduce_small": Call("all_reduce", SMALL_NUMEL)}
DEVICE_CALLS = {**CALLS, **{name: Call(name, DEVICE_NUMEL) for name in KINDS}}

Point = tuple[Action, int]


def points(call: Call, num_ranks: int) -> list[Point]:
    """Return the actions of ranks in a call on one host, each with its number of earlier occurrences.

    Which rank does what, and in which order, depends on its part of the call and on the progress of the others.
    """
    # First the sizes.
    entries = actions_of(1, two_passes=False) if call.name.startswith("all_to_all") else []
    num_bytes = 0 if call.name == "barrier" else call.numel * call.dtype.itemsize
    per_chunk = CHUNK_BYTES
    if "scatter" in call.name or call.name.startswith("all_to_all"):
        per_chunk = CHUNK_BYTES // num_ranks // 64 * 64
    two_passes = call.name in ("all_reduce", "reduce") and num_ranks > 2 and num_bytes > ONE_PASS_BYTES
    num_chunks = 0 if call.name == "barrier" else max(1, -(-num_bytes // per_chunk))
    entries += actions_of(num_chunks, two_passes=two_passes)
    return [(action, entries[:index].count(action)) for index, action in enumerate(entries)]


def actions_of(num_chunks: int, *, two_passes: bool) -> list[Action]:
    """Return the actions of a call with this number of chunks, none for a barrier."""
    of_a_chunk = [Action.PUT, Action.PUBLISH, *([Action.FOLD] if two_passes else []), Action.TAKE]
    return [Action.SIGN, Action.AWAIT, Action.CHECK, *(num_chunks * of_a_chunk or [Action.PUBLISH])]


class Striker:
    """An observer of an engine that calls a function once, before the given occurrence of an action.

    Args:
        point: The action and its occurrence.
        function: Called there; if the rank's part of the call lacks the action, at the start of the next call.
        num_signs: Number of times that the call signs.
    """

    def __init__(self, point: Point, function: Callable[[], None], num_signs: int = 1) -> None:
        self.point, self.function, self.num_signs = point, function, num_signs
        self.seen: dict[Action, int] = {}
        self.is_over = False

    def __call__(self, action: Action, chunk: int) -> None:
        """See `Engine.observer`."""
        number = self.seen.get(action, 0)
        self.seen[action] = number + 1
        is_late = action is Action.SIGN and number == self.num_signs
        if not self.is_over and ((action, number) == self.point or is_late):
            self.is_over = True
            self.function()


def at_point(pg: IpcProcessGroup, point: Point, function: Callable[[], None], num_signs: int = 1) -> None:
    """Call `function` when this rank reaches a point of its next call, see `Striker`."""
    pg._local.engine.observer = Striker(point, function, num_signs)


def shared_names() -> set[str]:
    """Return files of torch or of this project in /dev/shm; other programs have theirs there."""
    if not os.path.isdir("/dev/shm"):
        return set()
    return {name for name in os.listdir("/dev/shm") if "torch" in name or "frac" in name}


def mapped_arenas() -> list[str]:
    """Return our shared memory that this process has mapped or open. multiprocessing has mapped files in /dev/shm."""
    return [name for name in shared_memory() if "memfd" in name]


def control_pages(num_ranks: int) -> tuple[list[ControlPage], int]:
    arena, name = create_arena(control_bytes(num_ranks))
    os.close(name.fd)
    return [ControlPage(arena, rank, num_ranks) for rank in range(num_ranks)], arena.address


def waiter_of(page: ControlPage, address: int, num_ranks: int = 2) -> waiting.Waiter:
    """Return the waiter of one of several ranks, all of which are this process."""
    peers = [Peer(os.getpid(), start_time(os.getpid())) for _ in range(num_ranks)]
    return waiting.Waiter(page, address, peers, [f"rank {rank}" for rank in range(num_ranks)])


class Watching(TorchDispatchMode):
    """Records operations and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((function, args))
        return function(*args, **(kwargs or {}))


Error = tuple[str, str, float]


class InjectedError(RuntimeError):
    """Represents any error inside a collective, such as a failed allocation."""


def error_of(function: Callable[[], Any]) -> Error:
    """Return class, message and seconds of the error of a call; an empty class if it returns."""
    started = time.monotonic()
    try:
        function()
    except IpcError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    except RuntimeError as error:
        return "RuntimeError", str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def strike(fault: str) -> None:
    if fault == "raise":
        raise InjectedError("injected")
    if sys.platform == "win32":
        # It has no signals for these.
        this = psutil.Process()
        this.kill() if fault == "kill" else this.suspend()
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    # Another thread may have received the signal, and this thread must not continue until it stops too.
    time.sleep(3600)
