"""Count what a process holds that a start could leave behind, and check whether it grows over many starts."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

# gRPC's pool in every process of Ray starts and ends threads depending on the work.
_GRPC_POOL = "event_engine"


def belongings() -> dict[str, int]:
    """Return counts of what the calling process holds; ``rss_bytes`` is its resident memory."""
    gc.collect()
    process = psutil.Process()
    listening = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    return {
        "rss_bytes": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "threads": len([name for name in thread_names() if name != _GRPC_POOL]),
        "shared_memory": len(shared_memory()),
        "ports": len(listening),
        "children": len(process.children()),
        "variables": len(os.environ),
    }


def thread_names() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # one may end meanwhile
            found.append((task / "comm").read_text().strip())
    return found


def shared_memory() -> list[str]:
    """Return files in /dev/shm and memory files of this package that the calling process has open or mapped."""
    names = [line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()]
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in names if ("ray_fracbackend" in name and "memfd" in name) or name.startswith("/dev/shm/")]


@dataclass(frozen=True)
class Trend:
    """Trend of one count: medians of the first and the last fifth after the warm-up, and the slope per start.

    The slope is Theil-Sen's, the median over all pairs of samples, which is robust against outliers.
    """

    first: float
    last: float
    slope: float


def trend(at: Sequence[int], values: Sequence[float], warm_up: int) -> Trend:
    """Return the trend of a count that was sampled after the given numbers of starts.

    The first ``warm_up`` starts import, open and cache what stays.
    """
    warm = [(x, y) for x, y in zip(at, values, strict=True) if x >= warm_up]
    fifth = max(1, len(warm) // 5)
    numbers = [y for _, y in warm]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(warm, 2)]
    return Trend(
        first=statistics.median(numbers[:fifth]),
        last=statistics.median(numbers[-fifth:]),
        slope=statistics.median(slopes) if slopes else 0.0,
    )


@dataclass
class Samples:
    """Counts of each process by name, in the order of ``at``, the number of starts before a sample."""

    at: list[int] = field(default_factory=list)
    figures: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    threads: list[list[str]] = field(default_factory=list)

    def add(self, at: int, found: Mapping[str, Mapping[str, int]]) -> None:
        """Add counts of several processes, and the names of the threads of the calling one."""
        self.at.append(at)
        self.threads.append(thread_names())
        for process, figures in found.items():
            for name, value in figures.items():
                self.figures.setdefault(process, {}).setdefault(name, []).append(value)

    def judged(self, warm_up: int, rss_bytes_per_start: float) -> dict[str, Any]:
        """Return trends by process and count, and under ``grew`` a description of what grew.

        Memory may grow by this number of bytes per start, nothing else may grow.
        """
        trends, grew = {}, []
        for process, figures in self.figures.items():
            trends[process] = {name: trend(self.at, values, warm_up) for name, values in figures.items()}
            for name, each in trends[process].items():
                limit = rss_bytes_per_start if name == "rss_bytes" else 0.0
                if each.slope > limit or (name != "rss_bytes" and each.last > each.first):
                    grew.append(
                        f"{process}: {name} grew from {each.first:g} to {each.last:g}, by {each.slope:g} a start"
                    )
        return {
            "warm_up": warm_up,
            "limit_rss_bytes_per_start": rss_bytes_per_start,
            "trends": {process: {n: asdict(each) for n, each in found.items()} for process, found in trends.items()},
            "threads_gained": self._threads_gained(warm_up),
            "grew": grew,
        }

    def _threads_gained(self, warm_up: int) -> dict[str, int]:
        """Return the number of threads gained by name from the end of the warm-up to the last sample; negative if fewer."""
        warm = [Counter(names) for x, names in zip(self.at, self.threads, strict=True) if x >= warm_up]
        first, last = warm[0], warm[-1]
        return {name: last[name] - first[name] for name in first | last if last[name] != first[name]}
