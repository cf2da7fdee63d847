"""Find processes that share a CUDA device and the backend that a group of them can use. Needs only torch, not Ray.

Use it for groups besides the one that Ray Train starts: a trainer and its inference workers, or some of the workers.
The processes exchange data in a store before any process group exists. The decision is the same as in a start.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ray_fracbackend import __version__, _torch
from ray_fracbackend.decide.device_sharing import ShareGroup
from ray_fracbackend.decide.error_texts import cause_of
from ray_fracbackend.decide.plain import from_plain
from ray_fracbackend.decide.settings import Settings, is_seconds
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo, ranks_text
from ray_fracbackend.errors import IncompatibleWorkersError, MissingDeviceError, RendezvousError
from ray_fracbackend.worker.devices import boot_id
from ray_fracbackend.worker.missing_cuda import why_no_cuda
from ray_fracbackend.worker.probe import collect_info

# Extra time for rank 0's answer after its own wait has ended.
_ANSWER_S = 5.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 1e-3, 0.05


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
        IncompatibleWorkersError: The processes have different versions of NCCL or of this package, or different values
            of ``world_size``, or some are on Windows and some on other systems.
        BackendUnavailableError: The backend that would replace NCCL cannot run on these processes.
        RendezvousError: Processes did not call in time (``ranks`` names them), the store failed, or something else wrote to it.
        ValueError: An argument breaks its rule.
    """
    if not is_seconds(timeout_s):
        raise ValueError(
            f"check_devices(timeout_s={timeout_s!r}): timeout_s must be a number of seconds above 0, up to 1e9."
        )
    own = None if device is None else _cuda_device(device)
    store, rank, world_size = _place(group, store, rank, world_size)
    workers = _Meeting(store, rank, world_size, timeout_s).exchange(_probe_process(rank, own))
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
    """Collect the device and versions of the calling process, which Ray Train did not start; needs no Ray.

    Args:
        rank: Rank of the process in the group that will be created.
        device: CUDA device that the process uses in this group, the current one if None.

    Returns:
        The process as a worker with a whole GPU, on a node named after its host; ``cuda_missing`` is set if there is no
        such device.
    """
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
        True,
        rank=rank,
        node_id=boot_id(),
        node_ip=socket.gethostname(),
        resources={"GPU": 1.0},
        # Variables that a start has set here also apply to this group.
        env=os.environ,
        cuda_missing=cuda_missing,
    )


def _read(kind: Any, text: str | bytes, rank: int, key: str) -> Any:
    """Return a value of the store, which anything may have written.

    Raises:
        RendezvousError: It is not the JSON of this type; the message names rank and key.
    """
    try:
        return from_plain(kind, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise _foreign(rank, key, str(error)) from None


def _foreign(rank: int, key: str, found: str) -> RendezvousError:
    return RendezvousError(
        f"check_devices: the value of rank {rank} in the store (key {key}) is not a report of ray_fracbackend: {found}. "
        "Something else writes to this store: use a store that only these processes reach.",
        ranks=[rank],
    )


def _compare(reports: Sequence[Sequence[object]]) -> None:
    """Raise IncompatibleWorkersError if the reports have different versions or world sizes."""
    for place, name in enumerate(("version of ray_fracbackend", "world_size")):
        values = [each[place] for each in reports]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise IncompatibleWorkersError(
                f"check_devices: {name} is {values[0]} on rank 0 and {values[other]} on rank {other}. All processes need the same.",
                ranks=[other],
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _cuda_device(device: torch.device | str | int) -> torch.device:
    rule = "device must be a CUDA device, such as 'cuda:1' or 1"
    try:
        found = torch.device(f"cuda:{device}" if _is_int(device) else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"check_devices(device={device!r}): {rule} ({cause_of(error)}).") from None
    if found.type != "cuda":
        raise ValueError(f"check_devices(device={device!r}): {rule}.")
    return found


def _place(
    group: dist.ProcessGroup | None, store: Store | None, rank: int | None, world_size: int | None
) -> tuple[Store, int, int]:
    """Return the store, this process's rank and the number of processes."""
    if store is not None and group is not None:
        raise ValueError("check_devices() accepts a group or a store, not both.")
    if store is not None:
        is_rank = _is_int(rank) and _is_int(world_size) and 0 <= rank < world_size  # type: ignore[operator]
        if not is_rank:
            raise ValueError(
                f"check_devices(rank={rank!r}, world_size={world_size!r}): with a store, rank must be an integer from 0 to world_size - 1."
            )
        return store, rank, world_size  # type: ignore[return-value]  # checked
    if rank is not None or world_size is not None:
        raise ValueError("check_devices() accepts rank and world_size only with a store: add store=, or omit both.")
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


class _Meeting:
    """One exchange of all ranks in a store. Each call has its own keys."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size = rank, world_size
        self._timeout_s, self._end = timeout_s, time.monotonic() + timeout_s
        self._store = PrefixStore("ray_fracbackend/check_devices", store)

    def exchange(self, info: WorkerInfo) -> list[WorkerInfo]:
        """Return the reports of all ranks, by rank, on every rank."""
        try:
            self._store = PrefixStore(str(self._store.add(f"calls/{self._rank}", 1)), self._store)
            self._put(f"rank/{self._rank}", [__version__, self._world_size, json.dumps(asdict(info))])
            # Rank 0 reads all reports: with many ranks the store could not serve reads of every rank by every other rank.
            told = self._collect() if self._rank == 0 else self._answer()
            self._part(sum(each is not None for each in told))
        except RendezvousError:
            raise
        except (RuntimeError, OSError) as error:  # errors of the store: c10d raises RuntimeErrors
            first = cause_of(error)
            raise RendezvousError(
                f"check_devices: the store failed on rank {self._rank} ({first}). The process that hosts it must run until all have "
                "returned; check its log and the network."
            ) from error
        return self._checked(told)

    def _collect(self) -> Sequence[str | None]:
        """Wait for all ranks, read their reports, and store them for the others."""
        awaited = list(range(self._world_size))

        def all_came() -> bool:
            while awaited and self._came(awaited[0]):
                awaited.pop(0)
            return not awaited

        self._wait(all_came, self._end)
        came = [rank for rank in range(self._world_size) if not awaited or self._came(rank)]
        # Every byte is a character of latin-1: all ranks check the same values.
        read = {rank: self._store.get(f"rank/{rank}").decode("latin-1") for rank in came}
        told = [read.get(rank) for rank in range(self._world_size)]
        self._put("answer", told)
        return told

    def _put(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def _came(self, rank: int) -> bool:
        return self._store.check([f"rank/{rank}"])

    def _answer(self) -> Sequence[str | None]:
        if not self._wait(lambda: self._store.check(["answer"]), self._end + _ANSWER_S):
            raise self._late([rank for rank in range(self._world_size) if not self._came(rank)] or [0])
        answer: tuple[str | None, ...] = _read(tuple[str | None, ...], self._store.get("answer"), 0, "answer")
        return answer

    def _part(self, num_came: int) -> None:
        """Wait until all ranks have read the answer: after an error the process that hosts the store may end."""
        self._store.add("read", 1)
        with suppress(RuntimeError, OSError):  # the host has ended, so all ranks have read the answer
            self._wait(lambda: self._store.add("read", 0) >= num_came, time.monotonic() + _ANSWER_S)

    def _checked(self, told: Sequence[str | None]) -> list[WorkerInfo]:
        """Return the workers if all ranks called, with the same world size and the same version of this package."""
        texts = dict(enumerate(told))
        if absent := [rank for rank in range(self._world_size) if texts.get(rank) is None]:
            raise self._late(absent)
        keys = {rank: f"rank/{rank}" for rank in range(self._world_size)}
        # Another version may have other fields, so compare the versions first.
        reports = [_read(tuple[str, int, str], texts[rank] or "", rank, key) for rank, key in keys.items()]
        _compare(reports)
        workers = [_read(WorkerInfo, reports[rank][2], rank, key) for rank, key in keys.items()]
        for rank, worker in enumerate(workers):
            if worker.rank != rank:
                raise _foreign(rank, keys[rank], f"it is of rank {worker.rank}")
        return workers

    def _late(self, absent: list[int]) -> RendezvousError:
        return RendezvousError(
            f"check_devices: {ranks_text(absent)} did not call within {self._timeout_s:g} s. All {self._world_size} processes must call "
            "it, with the same store and world_size; check the logs of the missing ranks.",
            ranks=absent,
        )

    @staticmethod
    def _wait(is_done: Callable[[], bool], end: float) -> bool:
        """Poll until it is done. A wait of the store would block its client for all other calls."""
        pause_s = _MIN_PAUSE_S
        while not is_done():
            if time.monotonic() > end:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return True
