"""Verify a process group by running collectives with known results. Needs torch alone, no Ray.

Every rank contributes numbers that no other rank has, so that a lost, doubled or swapped contribution cannot pass. A
rank whose collective fails or stalls records that in the group's store; ranks without a record are reported as missing.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from ray_fracbackend.decide.nccl import cause_of, refusal_in, refused_ranks
from ray_fracbackend.decide.worker_info import ranks_text
from ray_fracbackend.errors import SharedDeviceError, VerificationError
from ray_fracbackend.timeouts import bounded

SMALL_BYTES = 1024
LARGE_BYTES = 1024 * 1024
# float64 holds every sum of integers that occurs exactly, up to tens of millions of ranks.
_DTYPE = torch.float64
_PERIOD = 7
# Ranks that look up which ranks are missing when a collective stalls; the rest would only load the store.
_NUM_REPORTERS = 8
# How long they wait for the others' records: all keep the same deadline.
_REPORT_S = 1.0
# Above the time limit, before a backend that does not keep it is left: Gloo keeps it.
_STALL_S = 0.2
# Timed calls of a size, of which the best counts.
_NUM_TIMED = 2
_T = TypeVar("_T")
_STEPS = ("barrier", "all_reduce of 1 KiB", "all_reduce of 1 MiB", "broadcast", "all_gather")


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """Measurements of a verified group; every result was exact.

    Attributes:
        backend: The group's backend as torch names it.
        device: Device that the collectives ran on, such as ``cuda:0``.
        world_size: Ranks in the group.
        latency_s: Seconds of an all_reduce of 1 KiB: of the call and its completion alone, after a call to warm up, the best
            of a few; the median of all ranks.
        bandwidth_bytes_per_s: 1 MiB over the seconds of its all_reduce, measured in the same way.
        rank_seconds: The two times of each rank added up, by rank in the group.
        total_s: Seconds of the whole verification on this rank.
    """

    backend: str
    device: str
    world_size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    rank_seconds: tuple[float, ...]
    total_s: float


def verify_process_group(
    group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None, timeout_s: float = 60.0
) -> VerificationResult:
    """Run barrier, all_reduce (1 KiB, 1 MiB), broadcast and all_gather, and compare every result exactly.

    All ranks of the group must call it. Blocks until the collectives are done on the host's clock.

    Args:
        group: The group to verify, the default group if None.
        device: Device of the tensors. By default the current CUDA device for an NCCL group, else the CPU; a group with one
            backend for each, such as ``cpu:gloo,cuda:nccl``, is then verified on both, and the result is that of CUDA.
        timeout_s: Bound on the whole verification, in seconds. A call that exceeds it keeps running in a thread of its own:
            abort the group then.

    Returns:
        Latency, bandwidth and the time of each rank.

    Raises:
        SharedDeviceError: NCCL refused ranks that share a GPU.
        torch.cuda.OutOfMemoryError: The device has no memory left for a tensor of 1 MiB.
        VerificationError: A collective failed, stalled or computed a wrong answer; ``ranks`` are those at fault where
            that is known.
        ValueError: ``timeout_s`` is not above 0, or torch.distributed is not initialised.
    """
    if not timeout_s > 0:
        raise ValueError(f"verify_process_group(timeout_s={timeout_s!r}): timeout_s must be above 0 seconds.")
    if not dist.is_initialized():
        raise ValueError(
            "verify_process_group() needs a process group: call torch.distributed.init_process_group first."
        )
    group = group or distributed_c10d._get_default_group()
    devices = [torch.device(device)] if device is not None else _default_devices(group)
    end = time.perf_counter() + timeout_s
    try:
        results = [_verify_on(group, each, max(end - time.perf_counter(), 0.001)) for each in devices]
    finally:
        del group  # see tracebacks.py: its peers would go on waiting for this rank
    return results[-1]


def backends_by_device(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend of a group for each device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def other_devices(device: torch.device | str, group: dist.ProcessGroup | None = None) -> list[torch.device]:
    """Return one device for each other backend of a group that this process can use: CPU and CUDA.

    Args:
        device: A device of the backend that is left out.
        group: The group, the default group if None.
    """
    backends = backends_by_device(group)
    own = backends.get(torch.device(device).type)
    found = {backend: kind for kind, backend in reversed(backends.items()) if backend != own and _is_usable(kind)}
    return [torch.device(kind) for kind in found.values()]


def _is_usable(device_type: str) -> bool:
    return device_type == "cpu" or (device_type == "cuda" and torch.cuda.is_available())


def _verify_on(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> VerificationResult:
    verification = _Verification(group, device, timeout_s)
    del group
    try:
        return _run(verification, timeout_s)
    finally:
        del verification._group


def _run(verification: _Verification, timeout_s: float) -> VerificationResult:
    """Verify in a thread: NCCL has waits without a limit, in the call, in the device and in its store."""
    outcome: list[VerificationResult | BaseException] = []

    def run() -> None:
        try:
            outcome.append(verification.run())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(timeout_s + _STALL_S, threading.TIMEOUT_MAX))
    if thread.is_alive() and verification.fails:
        thread.join(3 * _REPORT_S)
    if not outcome:
        raise verification.stalled()
    result = outcome.pop()
    if not isinstance(result, BaseException):
        return result
    try:
        raise result
    finally:
        del result


class _Verification:
    def __init__(self, group: dist.ProcessGroup, device: torch.device | str, timeout_s: float) -> None:
        self._group = group
        self._device = _indexed(torch.device(device))
        self._timeout_s = timeout_s
        self._started = time.perf_counter()
        self._world_size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._store = PrefixStore("ray_fracbackend/verify", distributed_c10d._get_process_group_store(group))
        self._current = 0
        self.fails = False

    def run(self) -> VerificationResult:
        # A thread begins on cuda:0, and a context there would take memory of another rank's device.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            return self._run()

    def stalled(self) -> VerificationError:
        """Return the error of a collective that has not returned."""
        return self._failure(self._current, TimeoutError(f"no answer within {self._timeout_s:.3g} s"))

    def _run(self) -> VerificationResult:
        self._step(0, self._barrier)
        latency_s = self._step(1, lambda: self._measure(SMALL_BYTES))
        large_s = self._step(2, lambda: self._measure(LARGE_BYTES))
        self._step(3, self._broadcast)
        times = self._step(4, lambda: self._all_gather(latency_s, large_s))
        return VerificationResult(
            backend=dist.get_backend(self._group),
            device=str(self._device),
            world_size=self._world_size,
            latency_s=statistics.median(row[0] for row in times),
            bandwidth_bytes_per_s=LARGE_BYTES / max(statistics.median(row[1] for row in times), 1e-9),
            rank_seconds=tuple(row[0] + row[1] for row in times),
            total_s=time.perf_counter() - self._started,
        )

    def _step(self, step: int, call: Callable[[], _T]) -> _T:
        self._current = step
        try:
            return call()
        except (VerificationError, torch.cuda.OutOfMemoryError):
            self._record_failure()
            raise
        except RuntimeError as error:  # what c10d raises for a lost peer and for a timeout
            self.fails = True
            # NCCL connects in the first collective, so its errors for shared GPUs are raised here.
            sentence = refusal_in(str(error))
            raise (self._refused(sentence) if sentence else self._failure(step, error)) from error

    def _wait(self, work: dist.Work | None) -> None:
        left_s = self._timeout_s - (time.perf_counter() - self._started)
        if work is not None:
            work.wait(timedelta(seconds=max(left_s, 0.001)))

    def _measure(self, num_bytes: int) -> float:
        """Return the seconds of an all_reduce, the best of a few; the first call connects the ranks and starts the device."""
        self._all_reduce(num_bytes, meet=False)
        return min(self._all_reduce(num_bytes) for _ in range(_NUM_TIMED))

    def _barrier(self) -> None:
        on_cuda = self._device.type == "cuda" and "nccl" in backends_by_device(self._group).values()
        device_ids = [self._device.index or 0] if on_cuda else None
        self._wait(dist.barrier(self._group, async_op=True, device_ids=device_ids))

    def _all_reduce(self, num_bytes: int, *, meet: bool = True) -> float:
        """Return the seconds of the call and its completion."""
        pattern = self._pattern(num_bytes)
        tensor = pattern * (self._rank + 1)
        if meet:  # so that the time does not include another rank's tensor creation
            self._barrier()
        self._synchronize()
        started = time.perf_counter()
        self._wait(dist.all_reduce(tensor, group=self._group, async_op=True))
        self._synchronize()
        seconds = time.perf_counter() - started
        self._compare(
            tensor, pattern * (self._world_size * (self._world_size + 1) // 2), f"all_reduce of {num_bytes} bytes"
        )
        return seconds

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _broadcast(self) -> None:
        source = self._world_size - 1
        pattern = self._pattern(SMALL_BYTES) * (source + 1)
        tensor = pattern.clone() if self._rank == source else torch.zeros_like(pattern)
        global_source = dist.get_global_rank(self._group, source)
        self._wait(dist.broadcast(tensor, global_source, group=self._group, async_op=True))
        self._compare(tensor, pattern, f"broadcast from rank {global_source}", (global_source,))

    def _all_gather(self, small_s: float, large_s: float) -> list[tuple[float, float]]:
        mine = torch.tensor([self._rank + 1, small_s, large_s], dtype=_DTYPE, device=self._device)
        gathered = [torch.zeros_like(mine) for _ in range(self._world_size)]
        self._wait(dist.all_gather(gathered, mine, group=self._group, async_op=True))
        rows = torch.stack(gathered).tolist()
        wrong = [rank for rank, row in enumerate(rows) if row[0] != rank + 1]
        if wrong:
            raise VerificationError(
                f"all_gather computed a wrong answer on rank {self._rank}: the slot of rank {wrong[0]} holds the data of "
                f"rank {rows[wrong[0]][0] - 1:g}. {_ADVICE}",
                ranks=wrong,
            )
        return [(row[1], row[2]) for row in rows]

    def _pattern(self, num_bytes: int) -> torch.Tensor:
        count = torch.arange(num_bytes // _DTYPE.itemsize, dtype=_DTYPE, device=self._device)
        return count % _PERIOD + 1

    def _compare(self, found: torch.Tensor, expected: torch.Tensor, what: str, ranks: tuple[int, ...] = ()) -> None:
        if torch.equal(found, expected):
            return
        index = int((found != expected).nonzero()[0])
        raise VerificationError(
            f"{what} computed a wrong answer on rank {self._rank}: element {index} is {found[index].item():g} and must be "
            f"{expected[index].item():g}. {_ADVICE}",
            ranks=ranks,
        )

    def _record_failure(self) -> None:
        """Record this rank's failure in the store, so that peers do not report it as missing."""
        with contextlib.suppress(RuntimeError):  # the store's own host may be gone already
            self._store.set(str(self._rank), "failed")

    def _refused(self, sentence: str) -> SharedDeviceError:
        self._record_failure()
        ranks = [dist.get_global_rank(self._group, rank) for rank in refused_ranks(sentence)]
        return SharedDeviceError(
            f"NCCL refused ranks that share a GPU: {sentence}. Use backend='gloo', or a GPU for each rank.", ranks=ranks
        )

    def _failure(self, step: int, error: Exception) -> VerificationError:
        elapsed = time.perf_counter() - self._started
        text = f"{_STEPS[step]} failed on rank {self._rank} after {elapsed:.1f} s"
        try:
            # A call that has not come back may hold the store's client.
            absent = bounded(self._absent, 2 * _REPORT_S)
        except TimeoutError:
            absent = []
        if absent:
            text += f": {ranks_text(absent)} {'is' if len(absent) == 1 else 'are'} not in it"
        advice = "Look at the log of that rank and at its node's network."
        if "out of memory" in str(error).lower():  # NCCL's own allocations
            advice = "The device is full: end what else runs on it, or let fewer ranks share it."
        return VerificationError(f"{text} ({cause_of(error)}). {advice}", ranks=absent)

    def _absent(self) -> list[int]:
        """Return the ranks without a record in the store; only the lowest ranks read them."""
        absent = [rank for rank in range(self._world_size) if rank != self._rank]
        end = time.monotonic() + _REPORT_S
        try:
            self._store.set(str(self._rank), "stuck")
            if self._rank >= _NUM_REPORTERS:
                return []
            while absent and time.monotonic() < end:
                absent = [rank for rank in absent if not self._store.check([str(rank)])]
                time.sleep(0.02)
        except (RuntimeError, ValueError):  # the store's own host is gone
            return []
        return absent


_ADVICE = "Do not train with this group: check the node's memory and network, or use backend='gloo'."


def _default_devices(group: dist.ProcessGroup) -> list[torch.device]:
    """Return one device for each backend of the group; the result is that of the last."""
    last = "cuda" if "nccl" in backends_by_device(group).values() and torch.cuda.is_available() else "cpu"
    return [*other_devices(last, group), torch.device(last)]


def _indexed(device: torch.device) -> torch.device:
    """Return the device with its index: the current device is per thread."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
