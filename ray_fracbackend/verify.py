"""Proves a process group with collectives whose exact answers are known. Needs torch alone, no Ray.

Every rank contributes numbers that no other rank has, so that a lost, doubled or swapped contribution cannot pass. A
rank whose collective fails or stalls says so in the group's store and reads there who does not: those are at fault.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from ray_fracbackend.errors import SharedDeviceError, VerificationError
from ray_fracbackend.facts import ranks_text
from ray_fracbackend.nccl_words import cause_of, refusal_in, refused_ranks

SMALL_BYTES = 1024
LARGE_BYTES = 1024 * 1024
# float64 holds every sum of integers that occurs exactly, up to tens of millions of ranks.
_DTYPE = torch.float64
_PERIOD = 7
# Ranks that look up who is missing when a collective stalls; the rest would only load the store.
_NUM_REPORTERS = 8
# How long they wait for the others to say that they are stuck as well: all keep the same deadline.
_REPORT_S = 1.0
# A rank is slow above this multiple of the median of its peers, and this much above it: below that it is noise.
_SLOW_FACTOR, _SLOW_MARGIN_S = 2.0, 0.1
_STEPS = ("barrier", "all_reduce of 1 KiB", "all_reduce of 1 MiB", "broadcast", "all_gather")


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """Figures of a verified group; that it exists means that every answer was exact.

    Attributes:
        backend: The group's backend as torch names it.
        device: Device that the collectives ran on, such as ``cuda:0``.
        world_size: Ranks in the group.
        latency_s: Seconds of an all_reduce of 1 KiB, the median of all ranks.
        bandwidth_bytes_per_s: 1 MiB over the seconds of its all_reduce, the median of all ranks.
        rank_seconds: Seconds that each rank spent in the timed collectives, by rank in the group.
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
    """Runs barrier, all_reduce (1 KiB, 1 MiB), broadcast and all_gather, and compares every answer exactly.

    All ranks of the group must call it. Blocks until the collectives are done on the host's clock.

    Args:
        group: The group to verify, the default group if None.
        device: Where the tensors live; by default the current CUDA device for an NCCL group, else the CPU.
        timeout_s: Bound on the whole verification, in seconds.

    Returns:
        Latency, bandwidth and the time of each rank.

    Raises:
        SharedDeviceError: NCCL refused ranks that share a GPU.
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
    verification = _Verification(group or distributed_c10d._get_default_group(), device, timeout_s)
    try:
        return verification.run()
    finally:
        # The traceback of a failure must not keep the group alive: its peers would go on waiting for this rank.
        del verification._group


def slow_ranks(rank_seconds: Sequence[float], class_of: Callable[[int], Hashable] = lambda rank: 0) -> tuple[int, ...]:
    """Ranks whose time is over twice the median of the ranks of their class.

    Args:
        rank_seconds: Seconds by rank.
        class_of: Ranks with equal values are in the same situation and comparable, such as those that share a device.
    """
    classes: dict[Hashable, list[int]] = {}
    for rank in range(len(rank_seconds)):
        classes.setdefault(class_of(rank), []).append(rank)
    slow = []
    for ranks in classes.values():
        median = statistics.median(rank_seconds[rank] for rank in ranks)
        limit = max(_SLOW_FACTOR * median, median + _SLOW_MARGIN_S)
        slow += [rank for rank in ranks if rank_seconds[rank] > limit]
    return tuple(sorted(slow))


class _Verification:
    def __init__(self, group: dist.ProcessGroup, device: torch.device | str | None, timeout_s: float) -> None:
        self._group = group
        self._device = torch.device(device) if device is not None else _default_device(group)
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._world_size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._store = PrefixStore("ray_fracbackend/verify", distributed_c10d._get_process_group_store(group))

    def run(self) -> VerificationResult:
        self._step(0, self._barrier)
        latency_s = self._timed(1, lambda: self._all_reduce(SMALL_BYTES))
        large_s = self._timed(2, lambda: self._all_reduce(LARGE_BYTES))
        self._step(3, self._broadcast)
        times = self._step(4, lambda: self._all_gather(latency_s, large_s))
        return VerificationResult(
            backend=dist.get_backend(self._group),
            device=str(self._device),
            world_size=self._world_size,
            latency_s=statistics.median(row[0] for row in times),
            bandwidth_bytes_per_s=LARGE_BYTES / max(statistics.median(row[1] for row in times), 1e-9),
            rank_seconds=tuple(row[0] + row[1] for row in times),
            total_s=time.monotonic() - self._started,
        )

    def _timed(self, step: int, call: Callable[[], None]) -> float:
        started = time.monotonic()
        self._step(step, call)
        return time.monotonic() - started

    def _step(self, step: int, call: Callable[[], object]) -> list[tuple[float, float]]:
        try:
            return call()  # type: ignore[return-value]
        except VerificationError:
            self._say_failed()
            raise
        except RuntimeError as error:  # what c10d raises for a lost peer and for a timeout
            # NCCL connects in the first collective, so that its refusals come out here.
            sentence = refusal_in(str(error))
            raise (self._refused(sentence) if sentence else self._failure(step, error)) from error

    def _wait(self, work: dist.Work | None) -> None:
        left_s = self._timeout_s - (time.monotonic() - self._started)
        if work is not None:
            work.wait(timedelta(seconds=max(left_s, 0.001)))

    def _barrier(self) -> None:
        on_cuda = self._device.type == "cuda" and "nccl" in dist.get_backend_config(self._group)
        device_ids = [self._device.index or 0] if on_cuda else None
        self._wait(dist.barrier(self._group, async_op=True, device_ids=device_ids))

    def _all_reduce(self, num_bytes: int) -> None:
        pattern = self._pattern(num_bytes)
        tensor = pattern * (self._rank + 1)
        self._wait(dist.all_reduce(tensor, group=self._group, async_op=True))
        self._compare(
            tensor, pattern * (self._world_size * (self._world_size + 1) // 2), f"all_reduce of {num_bytes} bytes"
        )

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

    def _say_failed(self) -> None:
        """Tells the others that this rank is not the one that is missing."""
        with contextlib.suppress(RuntimeError):  # the store's own host may be gone already
            self._store.set(str(self._rank), "failed")

    def _refused(self, sentence: str) -> SharedDeviceError:
        self._say_failed()
        ranks = [dist.get_global_rank(self._group, rank) for rank in refused_ranks(sentence)]
        return SharedDeviceError(
            f"NCCL refused ranks that share a GPU: {sentence}. Use backend='gloo', or a GPU for each rank.", ranks=ranks
        )

    def _failure(self, step: int, error: RuntimeError) -> VerificationError:
        elapsed = time.monotonic() - self._started
        text = f"{_STEPS[step]} failed on rank {self._rank} after {elapsed:.1f} s"
        absent = self._absent()
        if absent:
            text += f": {ranks_text(absent)} {'is' if len(absent) == 1 else 'are'} not in it"
        return VerificationError(
            f"{text} ({cause_of(error)}). Look at the log of that rank and at its node's network.", ranks=absent
        )

    def _absent(self) -> list[int]:
        """Ranks that do not say that they failed or wait as well, asked by the lowest ranks only."""
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


def _default_device(group: dist.ProcessGroup) -> torch.device:
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
