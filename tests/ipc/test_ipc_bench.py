"""The benchmark runs and returns complete rows; how fast it finds things is no test's business."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from ray_fracbackend.cli import bench_rank, bench_ranks
from tests.processes import run_processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started as ``python -m`` and must find this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.full
def test_rows_are_complete() -> None:
    """Each operation, size and backend has a row with positive, ordered quartiles, and progress reaches its total."""
    seen = []
    rows = bench_ranks.run_benchmark(
        2,
        operations=["all_reduce", "ddp_step"],
        sizes=[4096],
        rounds=1,
        starts=2,
        progress=lambda done, total, what: seen.append((done, total, what)),
    )
    assert {(row["operation"], row["backend"]) for row in rows} == {
        (operation, backend) for operation in ("all_reduce", "ddp_step") for backend in ("ipc", "gloo", "copy")
    }
    for row in rows:
        assert 0 < row["p25_ms"] <= row["median_ms"] <= row["p75_ms"]
        assert (row["num_bytes"], row["num_ranks"]) == (4096, 2)
        assert len(row["start_medians_ms"]) == 2
        assert min(row["start_medians_ms"]) <= row["median_ms"] <= max(row["start_medians_ms"])
    assert [done for done, _, _ in seen] == [1, 2, 3, 4]
    assert {total for _, total, _ in seen} == {4}


def test_a_failing_rank_is_reported_with_its_output() -> None:
    """The error has what the rank printed."""
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        bench_ranks.run_benchmark(1, operations=["all_reduce"], sizes=[0], rounds=1)


def ask(rank: int, num_ranks: int, port: int) -> list[bool]:
    """Whether a group works: it does, it has no such device on rank 1, it does."""
    store = TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("ipc", store=store, rank=rank, world_size=num_ranks)
    working, alone = dist.new_group(backend="gloo"), dist.new_group([0], backend="gloo")
    cpu, refused = torch.device("cpu"), torch.device("mps")
    cases = [(working, cpu), (working, refused) if rank else (alone, cpu), (working, cpu)]
    answers = [bench_rank._works_everywhere(group, device) for group, device in cases]
    dist.destroy_process_group()
    return answers


def test_a_backend_that_one_rank_cannot_use_is_left_out_on_all() -> None:
    """Else the ranks would measure different things, and wait for each other."""
    assert run_processes(ask, 2) == [[True, False, True]] * 2
