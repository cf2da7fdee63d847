"""Measure how much of the machine other processes use, and start processes that use it on purpose."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

# Ends with its standard input, and therefore with the process that started it.
_LOOP = """
import os, threading
threading.Thread(target=lambda: os._exit(len(os.read(0, 1))), daemon=True).start()
while True:
    pass
"""


def busy_s(without: Sequence[int] = ()) -> float:
    """Return the CPU seconds since boot of all processes except these; those of virtual machines count once."""
    times = psutil.cpu_times()
    total = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    for pid in without:
        own = psutil.Process(pid).cpu_times()
        total -= own.user + own.system
    return float(total)


@contextmanager
def busy_loops(number: int) -> Iterator[list[int]]:
    """Run processes that use a whole core if they can, like workers of a data loader; yield their process ids."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP], stdin=subprocess.PIPE) for _ in range(number)]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            with suppress(BrokenPipeError):
                loop.communicate()


class OthersShare:
    """Share of CPU time used by processes other than this one and its ended children, since creation."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy_s(), sum(usage.ru_utime + usage.ru_stime for usage in own)

    def __call__(self) -> float:
        """Return the share, from 0 (nothing else ran) to 1."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return round(max(0.0, busy - own) / (wall * (os.cpu_count() or 1)), 3)
