"""Destroying process groups whose threads are still running."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_fracbackend.worker import group_end
from ray_fracbackend.worker.group_end import end_process_group
from ray_fracbackend.worker.process_group import start_worker
from tests.processes import CONTEXT, run_processes
from tests.unit.test_process_group import cpu_plan


def end_while_gloo_runs(rank: int, num_processes: int, port: int, backend: str, over: Any) -> bool:
    """End the group while one of its operations waits for the other rank and only Gloo references its tensor; return whether it ended."""
    start_worker(replace(cpu_plan(rank, port, budget_s=60), backend=backend, timeout_s=2))
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
        end_process_group(failed=True)
        over.set()
    over.wait(60)
    return rank == 1 or not dist.is_initialized()


@pytest.mark.parametrize("backend", ["gloo", pytest.param("cpu:gloo,cuda:gloo", marks=pytest.mark.full)])
def test_a_group_ends_while_gloo_has_a_tensor(backend: str) -> None:
    """Gloo's thread needs the GIL to free the tensor. Before torch 2.8 torch's destroy_process_group() hangs here (pytorch#154976)."""
    assert run_processes(end_while_gloo_runs, 2, backend, CONTEXT.Event(), timeout_s=90) == [True, True]


@pytest.mark.parametrize("backend", ["nccl", "ipc", "staged"])
def test_a_failed_group_is_aborted(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort that hangs is left."""
    steps: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group_end, "backends_by_device", lambda: {"cuda": backend})
    monkeypatch.setattr(group_end, "ABORT_S", 0.1)
    monkeypatch.setattr(
        group_end._torch, "abort_groups", lambda: (steps.append("begins"), time.sleep(3), steps.append("ends"))
    )
    end_process_group(failed=True)
    assert steps == ["begins"]
