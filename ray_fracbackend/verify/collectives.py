"""Verify a process group by running collectives with known results. Needs only torch, not Ray.

Every rank contributes different numbers, so a lost, doubled or swapped contribution is detected. A rank whose
collective fails or stalls writes a record to the group's store. Ranks without a record are reported as missing.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ray_fracbackend import _torch
from ray_fracbackend.decide.advice import advise
from ray_fracbackend.decide.settings import is_seconds
from ray_fracbackend.errors import VerificationError
from ray_fracbackend.timeouts import bounded
from ray_fracbackend.verify.result import VerificationResult

SMALL_BYTES = 1024
LARGE_BYTES = 1024 * 1024
# float64 represents all sums that occur exactly, up to tens of millions of ranks.
_DTYPE = torch.float64
_PERIOD = 7
# Time after the limit before a backend that ignores it is abandoned. Gloo respects it.
_STALL_S = 0.2
# Timed calls of each size, of which the fastest counts, after untimed ones that connect the ranks and start the device.
_NUM_TIMED, _NUM_UNTIMED = 2, 1
# Pause between two polls of an NCCL call.
_MIN_PAUSE_S, _MAX_PAUSE_S = 20e-6, 1e-3


def verify_process_group(
    group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None, timeout_s: float = 60.0
) -> VerificationResult:
    """Run barrier, all_reduce (1 KiB, 1 MiB), broadcast and all_gather, and compare every result exactly.

    All ranks of the group must call it. It blocks until the collectives are complete on the host.

    Args:
        group: The group to verify, the default group if None.
        device: Device of the tensors. The default is the current CUDA device if the group's CUDA tensors use NCCL or
            the staged backend, or if the group has a CUDA backend and this process has used CUDA; else the CPU. A group
            with one backend for each device type, such as ``cpu:gloo,cuda:nccl``, is then verified on both, and the
            result is that of CUDA. On Windows the default for Gloo is the CPU, because all_reduce of a CUDA tensor ends
            the process (pytorch#186535).
        timeout_s: Time limit of the whole verification, in seconds. A call that exceeds it continues in its own thread;
            abort the group in this case.

    Returns:
        Latency, bandwidth and the time of each rank.

    Raises:
        SharedDeviceError: NCCL refused ranks that share a GPU.
        torch.cuda.OutOfMemoryError: The device has no memory left for its context or for a tensor of 1 MiB.
        VerificationError: A collective failed, stalled or computed a wrong result; ``ranks`` are the ranks at fault, if
            known.
        ValueError: ``timeout_s`` is not above 0 or is above 1e9, torch.distributed is not initialized, or this rank is
            not in the group.
    """
    if not is_seconds(timeout_s):
        raise ValueError(
            f"verify_process_group(timeout_s={timeout_s!r}): timeout_s must be an int or float of seconds above 0, up to 1e9."
        )
    if dist.get_rank(group) < 0:
        raise ValueError("only the ranks of the group may call verify_process_group(), and this rank is not in it.")
    try:
        return _verify(group or _torch.default_group(), device, timeout_s)
    except BaseException as error:
        _torch.release_frames(error)
        raise


def backends_by_device(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend of a group for each device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _default_devices(group: dist.ProcessGroup) -> list[torch.device]:
    """Return one device for each backend of the group, of CPU and CUDA. The last one provides the result."""
    backends, has_cuda = backends_by_device(group), torch.cuda.is_available()
    of_cpu, of_cuda = backends.get("cpu"), backends.get("cuda") if has_cuda else None
    dies = of_cuda == "gloo" and sys.platform == "win32"
    used = torch.cuda.is_initialized() and not dies  # type: ignore[no-untyped-call]
    on_cuda = of_cuda is not None and (used or of_cuda in ("nccl", "staged"))
    both = of_cpu is not None and of_cuda is not None and of_cpu != of_cuda
    kinds = ("cpu", "cuda") if on_cuda else ("cuda", "cpu")
    return [torch.device(kind) for kind in (kinds if both else kinds[1:])]


def _verify(group: dist.ProcessGroup, device: torch.device | str | None, timeout_s: float) -> VerificationResult:
    devices = [torch.device(device)] if device is not None else _default_devices(group)
    end = time.perf_counter() + timeout_s
    for each in devices:  # no comprehension, which is a closure
        result = _verify_on(group, each, max(end - time.perf_counter(), 0.001))
    return result


def _verify_on(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> VerificationResult:
    verification = Verification(group, device, timeout_s)
    try:
        # NCCL has waits without a timeout: in the call, on the device and in its store.
        return bounded(verification.run, timeout_s + _STALL_S)
    except (RuntimeError, TimeoutError) as error:  # from c10d for lost peers and timeouts; from bounded()
        from ray_fracbackend.verify.failure import raise_failure  # not imported on the good path

        raise_failure(verification, error)
        raise


class Verification:
    """One verification on one rank.

    Attributes:
        group: The group.
        step: The current step, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self.group = group
        self.device = device
        if device.type == "cuda" and device.index is None:  # the current device is per thread
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.timeout_s = timeout_s
        self.started = time.perf_counter()
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self.own_rank = self.global_ranks[self.rank]
        self.store = PrefixStore("ray_fracbackend/verify", _torch.store_of(group))
        self.step = ""

    @property
    def backend(self) -> str | None:
        """Backend of the group for tensors of the device."""
        return backends_by_device(self.group).get(self.device.type)

    @property
    def has_gloo(self) -> bool:
        """Whether Gloo can replace the backend."""
        return self.backend != "gloo" and dist.is_gloo_available()

    def run(self) -> VerificationResult:
        """Run the collectives.

        Raises:
            VerificationError: A collective computed a wrong result.
            RuntimeError: A collective failed, with torch's message.
            TimeoutError: A collective did not return in time.
        """
        # A new thread starts on cuda:0, and a context there would use memory of another rank's device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            return self._run()

    def _run(self) -> VerificationResult:
        self.step = "barrier"
        self._barrier()
        self.step = "all_reduce of 1 KiB"
        # Gloo's ranks are already connected, and with more ranks than cores each call takes tens of milliseconds.
        is_ready = self.backend == "gloo" and self.device.type == "cpu"
        num_untimed, num_timed = (0, 1) if is_ready else (_NUM_UNTIMED, _NUM_TIMED)
        latency_s = self._measure(SMALL_BYTES, num_untimed, num_timed)
        self.step = "all_reduce of 1 MiB"
        large_s = self._measure(LARGE_BYTES, 0, num_timed)
        self.step = "broadcast"
        self._broadcast()
        self.step = "all_gather"
        times = self._all_gather(latency_s, large_s)
        return VerificationResult(
            backend=dist.get_backend(self.group),
            device=str(self.device),
            world_size=self.world_size,
            latency_s=statistics.median(row[0] for row in times),
            bandwidth_bytes_per_s=LARGE_BYTES / max(statistics.median(row[1] for row in times), 1e-9),
            rank_seconds=tuple(row[0] + row[1] for row in times),
            total_s=time.perf_counter() - self.started,
            path=getattr(self.group, "device_path", None) if self.device.type != "cpu" else None,
        )

    def _wait(self, work: dist.Work | None) -> None:
        if work is None:
            return
        end, pause_s, is_polled = self.started + self.timeout_s, _MIN_PAUSE_S, self.backend == "nccl"
        # If a wait for NCCL reaches its own timeout, torch's watchdog ends the process, in torch 2.7 at once.
        while is_polled and not work.is_completed():
            if time.perf_counter() > end:
                raise TimeoutError(f"no answer within {self.timeout_s:.3g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        work.wait(timedelta(seconds=max(end - time.perf_counter(), 0.001)))

    def _measure(self, num_bytes: int, num_untimed: int, num_timed: int) -> float:
        """Return the seconds of an all_reduce, the fastest of the timed calls."""
        pattern = self._pattern(num_bytes)
        total = pattern * (self.world_size * (self.world_size + 1) // 2)
        # The previous call synchronizes the ranks; a barrier would cost as much as the measured call.
        calls = range(num_untimed + num_timed)
        return min([self._all_reduce(pattern * (self.rank + 1), total) for _ in calls][num_untimed:])

    def _barrier(self) -> None:
        on_cuda = self.device.type == "cuda" and "nccl" in backends_by_device(self.group).values()
        device_ids = [self.device.index or 0] if on_cuda else None
        self._wait(dist.barrier(self.group, async_op=True, device_ids=device_ids))

    def _all_reduce(self, tensor: torch.Tensor, expected: torch.Tensor) -> float:
        """Return the seconds from the call to its completion."""
        self._synchronize()
        started = time.perf_counter()
        self._wait(dist.all_reduce(tensor, group=self.group, async_op=True))
        self._synchronize()
        seconds = time.perf_counter() - started
        self._compare(tensor, expected, f"all_reduce of {tensor.nbytes} bytes")
        return seconds

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _broadcast(self) -> None:
        source = self.world_size - 1
        pattern = self._pattern(SMALL_BYTES) * (source + 1)
        tensor = pattern.clone() if self.rank == source else torch.zeros_like(pattern)
        global_source = self.global_ranks[source]
        self._wait(dist.broadcast(tensor, global_source, group=self.group, async_op=True))
        self._compare(tensor, pattern, f"broadcast from rank {global_source}", (global_source,))

    def _all_gather(self, small_s: float, large_s: float) -> list[tuple[float, float]]:
        mine = torch.tensor([self.rank + 1, small_s, large_s], dtype=_DTYPE, device=self.device)
        gathered = [torch.zeros_like(mine) for _ in range(self.world_size)]
        self._wait(dist.all_gather(gathered, mine, group=self.group, async_op=True))
        rows = torch.stack(gathered).tolist()
        wrong = [rank for rank, row in enumerate(rows) if row[0] != rank + 1]
        if wrong:
            ranks, contributed = [self.global_ranks[rank] for rank in wrong], rows[wrong[0]][0] - 1
            held = self.global_ranks[int(contributed)] if contributed in range(self.world_size) else "none"
            raise self._wrong("all_gather", f"the slot of rank {ranks[0]} holds the data of rank {held}", ranks)
        return [(row[1], row[2]) for row in rows]

    def _pattern(self, num_bytes: int) -> torch.Tensor:
        count = num_bytes // _DTYPE.itemsize
        period = torch.arange(1, _PERIOD + 1, dtype=_DTYPE, device=self.device)
        return period.repeat(count // _PERIOD + 1)[:count]

    def _compare(self, found: torch.Tensor, expected: torch.Tensor, what: str, ranks: Sequence[int] = ()) -> None:
        if not torch.equal(found, expected):
            index = int((found != expected).nonzero()[0])
            values = f"element {index} is {found[index].item():g} and must be {expected[index].item():g}"
            raise self._wrong(what, values, ranks)

    def _wrong(self, what: str, found: str, ranks: Sequence[int]) -> VerificationError:
        return VerificationError(
            f"{what} computed a wrong result on rank {self.own_rank}: {found}.",
            advice=advise("wrong answer", has_gloo=self.has_gloo),
            ranks=ranks,
            kind="wrong_answer",
            step=self.step,
        )
