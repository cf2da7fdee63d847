"""Clocks: which one is fine enough for the measurements of a start."""

from __future__ import annotations

import sys
import time

import pytest
import torch.distributed as dist

from ray_fracbackend.verify.collectives import verify_process_group
from ray_fracbackend.worker.network import gloo_missing
from ray_fracbackend.worker.store import open_store

pytestmark = pytest.mark.windows(reason="the resolution of Windows' clocks")


def test_resolution_of_the_clocks() -> None:
    """time.monotonic has ticks of 15.6 ms up to Python 3.12; time.perf_counter is fine in all versions."""
    monotonic = time.get_clock_info("monotonic").resolution
    assert monotonic == 0.015625 if sys.version_info < (3, 13) else monotonic < 1e-5
    assert time.get_clock_info("perf_counter").resolution < 1e-5


@pytest.mark.skipif(gloo_missing() is not None, reason="torch without a Gloo transport")
def test_figures_are_finer_than_a_tick() -> None:
    """An all_reduce of one rank takes much less than a tick, and its latency is above 0."""
    dist.init_process_group("gloo", store=open_store(), rank=0, world_size=1)
    try:
        found = [verify_process_group() for _ in range(3)]
    finally:
        dist.destroy_process_group()
    assert all(each.latency_s > 0 and each.total_s > 0 for each in found)
    assert min(each.latency_s for each in found) < 0.015
    assert max(each.bandwidth_bytes_per_s for each in found) < 1e13
