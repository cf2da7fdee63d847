"""Clocks: which one is fine enough for the measurements of a start."""

from __future__ import annotations

import sys
import time

import pytest

pytestmark = pytest.mark.windows(reason="the resolution of Windows' clocks")


def test_resolution_of_the_clocks() -> None:
    """time.monotonic has ticks of 15.6 ms up to Python 3.12; time.perf_counter is fine in all versions."""
    monotonic = time.get_clock_info("monotonic").resolution
    assert monotonic == 0.015625 if sys.version_info < (3, 13) else monotonic < 1e-5
    assert time.get_clock_info("perf_counter").resolution < 1e-5
