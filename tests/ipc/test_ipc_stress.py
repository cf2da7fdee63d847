"""Long runs: exact results and flat memory over many collectives and pauses."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch.distributed as dist
from ipc_harness import Job, on_ranks
from ipc_workloads import overlap


def resident_bytes() -> int:
    """Return this process's own memory (not shared)."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


@pytest.mark.full
@pytest.mark.parametrize(("size", "num_calls"), [(2, 3000), (2, 100_000), (3, 100_000)])
@on_ranks(limit_s=550)
def test_many_collectives_are_exact_and_leak_no_memory(job: Job, size: int, num_calls: int) -> None:
    """Small and large ones on two groups."""
    job.init()
    groups, sizes = [dist.new_group(), dist.new_group()], (*range(1, 2000, 20), 1_000_003)
    overlap(job, groups, num_calls // 5, sizes)
    base = resident_bytes()
    overlap(job, groups, num_calls, sizes)
    assert resident_bytes() - base < 8 << 20
