"""How much of the machine other processes use while something is measured."""

from __future__ import annotations

import os
import resource
import time

import psutil


def busy_s() -> float:
    """CPU seconds that all processes of the machine have used since boot; those of virtual machines count once."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


class OthersShare:
    """Share of the machine's CPU time that other processes than this one and its ended children used since this object was made."""

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
