"""Find processes that share a CUDA device and the backend that a group of them can use. Needs only torch, not Ray.

Use it for groups besides the one that Ray Train starts: a trainer and its inference workers, or some of the workers.
The processes exchange data in a store before any process group exists. The decision is the same as in a start.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ray_fracbackend import __version__, _torch
from ray_fracbackend.decide.device_sharing import ShareGroup
from ray_fracbackend.decide.error_texts import cause_of
from ray_fracbackend.decide.plain import from_plain, workers_of
from ray_fracbackend.decide.settings import Settings, is_seconds
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo, ranks_text
from ray_fracbackend.errors import FracBackendError, MissingDeviceError, RendezvousError
from ray_fracbackend.worker.devices import boot_id
from ray_fracbackend.worker.missing_cuda import why_no_cuda
from ray_fracbackend.worker.probe import collect_info

# Extra time for rank 0's answer after its own wait has ended.
_ANSWER_S = 5.0
_PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class DeviceCheck:
    """Result of `check_devices`, equal on all ranks.

    Attributes:
        backend: Backend that the group can use for CUDA tensors, as ``FracTorchConfig()`` would choose it: ``nccl`` if
            NCCL accepts these ranks, else ``gloo``, on Windows ``cpu:gloo,cuda:staged``.
        reason: The decision in one line, as in the log of a start.
        share_groups: Ranks that share a device, or that NCCL considers to share one; empty if every rank has its own device.
        devices: The device of each rank, in rank order.
        env: Variables to set on every rank before the group is created, unless they are set: NCCL's variables for
            several ranks per GPU.
    """

    backend: str
    reason: str
    share_groups: tuple[ShareGroup, ...]
    devices: tuple[DeviceInfo, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def check_devices(
    group: dist.ProcessGroup | None = None,
    *,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | int | None = None,
    timeout_s: float = 60.0,
) -> DeviceCheck:
    """Find processes that share a CUDA device, and whether NCCL accepts them, before they create a process group.

    All processes must call it, with a common store or with an existing process group. It sends no tensor. Values
    of the store are read as JSON and checked: what anything else writes to it can make the call fail, and is never executed.

    Args:
        group: The processes are the ranks of this group; the default group if None and no store is given.
        store: Store in which the processes exchange data, such as a `torch.distributed.TCPStore`; requires ``rank`` and
            ``world_size``.
        rank: This process's rank, 0 to ``world_size`` - 1.
        world_size: Number of processes.
        device: The CUDA device that this process uses in the group, the current one if None.
        timeout_s: Time limit in seconds of the wait for the other processes.

    Returns:
        The backend that the group can use and the reason, the ranks that share a device, and the device of each rank.

    Raises:
        MissingDeviceError: A process has no CUDA device.
        SharedDeviceError: A shared device is in compute mode EXCLUSIVE_PROCESS, and MPS is not reachable from all its ranks.
        IncompatibleWorkersError: The processes have different versions of NCCL or of this package, or some are on Windows
            and some on other systems.
        BackendUnavailableError: The backend that would replace NCCL cannot run on these processes.
        RendezvousError: Processes did not call in time (``ranks`` names them), the store failed, or something else wrote to it.
        ValueError: An argument breaks its rule.
    """
    if not is_seconds(timeout_s):
        raise ValueError(
            f"check_devices(timeout_s={timeout_s!r}): timeout_s must be a number of seconds above 0, up to 1e9."
        )
    own = None
    if device is not None:
        own = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if own.type != "cuda":
            raise ValueError(f"check_devices(device={device!r}): device must be a CUDA device, such as 'cuda:1' or 1.")
    store, rank, world_size = _place(group, store, rank, world_size)
    try:
        workers = _exchange(store, world_size, timeout_s, _probe_process(rank, own))
    except FracBackendError:
        raise
    except (ValueError, RecursionError) as error:
        raise RendezvousError(
            f"check_devices: a value in the store is not a report of ray_fracbackend: {error}. Something else writes to this store: use "
            "a store that only these processes reach."
        ) from None
    except (RuntimeError, OSError) as error:  # errors of the store: c10d raises RuntimeErrors
        raise RendezvousError(
            f"check_devices: the store failed on rank {rank} ({cause_of(error)}). The process that hosts it must run until all have "
            "returned; check its log and the network."
        ) from error
    without = [worker for worker in workers if not worker.devices]
    if without:
        causes = "; ".join(f"{worker.where}: {worker.cuda_missing}" for worker in without[:4])
        raise MissingDeviceError(
            f"{ranks_text([worker.rank for worker in without])} cannot use a CUDA device ({causes}). Every process of the group needs "
            "one: assign one to it, or create the group with gloo for CPU tensors.",
            ranks=[worker.rank for worker in without],
        )
    plan = decide_start(workers, Settings())
    return DeviceCheck(
        backend=plan.backend,
        reason=plan.reason,
        share_groups=plan.share_groups,
        devices=tuple(worker.devices[0] for worker in workers),
        env=plan.env_defaults,
    )


def _probe_process(rank: int, device: torch.device | None = None) -> WorkerInfo:
    """Describe the calling process as a worker with a whole GPU, on a node named after its host; needs no Ray."""
    devices, cuda_missing = [], None
    try:
        # Before CUDA is initialized is_available() uses NVML, which does not detect a forked process.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        devices = [device]
    except Exception as error:  # AssertionError, RuntimeError, or DeferredCudaCallError, which is neither
        cuda_missing = why_no_cuda(error)
    return collect_info(
        devices,
        rank=rank,
        node_id=boot_id(),
        node_ip=socket.gethostname(),
        resources={"GPU": 1.0},
        # Variables that a start has set here also apply to this group.
        env=os.environ,
        cuda_missing=cuda_missing,
    )


def _place(
    group: dist.ProcessGroup | None, store: Store | None, rank: int | None, world_size: int | None
) -> tuple[Store, int, int]:
    """Return the store, this process's rank and the number of processes."""
    if store is not None and rank is not None and world_size is not None and group is None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"check_devices(rank={rank!r}, world_size={world_size!r}): rank must be an integer from 0 to world_size - 1."
            )
        return store, rank, world_size
    if store is not None or rank is not None or world_size is not None:
        raise ValueError("check_devices() needs a group, or store=, rank= and world_size= together.")
    if not dist.is_initialized():
        raise ValueError(
            "check_devices() needs a store or a process group: pass store=, rank= and world_size=, or call "
            "torch.distributed.init_process_group first."
        )
    group = group or _torch.default_group()
    own_rank = dist.get_rank(group)
    if own_rank < 0:
        raise ValueError("only the ranks of the group may call check_devices(), and this rank is not in it.")
    return _torch.store_of(group), own_rank, dist.get_world_size(group)


def _exchange(store: Store, world_size: int, timeout_s: float, own: WorkerInfo) -> list[WorkerInfo]:
    """Return the reports of all ranks, by rank, on every rank. Each call and each world size has its own keys.

    Rank 0 reads all reports: with many ranks the store could not serve reads of every rank by every other rank.
    """
    end = time.monotonic() + timeout_s
    store = PrefixStore(f"ray_fracbackend/check_devices/{world_size}", store)
    store = PrefixStore(str(store.add(f"calls/{own.rank}", 1)), store)
    keys = [f"rank/{rank}" for rank in range(world_size)]
    store.set(keys[own.rank], json.dumps([__version__, json.dumps(asdict(own))]))
    if own.rank == 0:
        _wait(lambda: store.check(keys), end)
        told = [store.get(key).decode("latin-1") if store.check([key]) else None for key in keys]
        store.set("answer", json.dumps(told))
    elif _wait(lambda: store.check(["answer"]), end + _ANSWER_S):
        told = list(from_plain(tuple[str | None, ...], json.loads(store.get("answer"))))
        if len(told) != world_size:
            raise ValueError(f"answer has {len(told)} values")
    else:
        told = [None if rank == 0 else "" for rank in range(world_size)]
    # Wait until all ranks have read the answer: after an error the process that hosts the store may end.
    store.add("read", 1)
    with suppress(RuntimeError, OSError):  # the host has ended, so all ranks have read the answer
        _wait(lambda: store.add("read", 0) >= world_size - told.count(None), time.monotonic() + _ANSWER_S)
    return _checked(told, timeout_s)


def _checked(told: list[str | None], timeout_s: float) -> list[WorkerInfo]:
    """Return the workers if all ranks called, with the same version of this package."""
    if absent := [rank for rank, text in enumerate(told) if text is None]:
        raise RendezvousError(
            f"check_devices: {ranks_text(absent)} did not call within {timeout_s:g} s. All {len(told)} processes must call it, with the "
            "same store and world_size; check the logs of the missing ranks.",
            ranks=absent,
        )
    reports = [from_plain(tuple[str, str], json.loads(text or "")) for text in told]
    workers = list(workers_of([(version, json.loads(info)) for version, info in reports]))
    if [worker.rank for worker in workers] != list(range(len(workers))):
        raise ValueError(f"the ranks are {[worker.rank for worker in workers]}")
    return workers


def _wait(is_done: Callable[[], bool], end: float) -> bool:
    """Poll until it is done. A wait of the store would block its client for all other calls."""
    while not is_done():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)
    return True
