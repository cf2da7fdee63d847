"""The benchmark runs and returns complete rows; how fast it finds things is no test's business."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_fracbackend.ipc import bench

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started as ``python -m`` and must find this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_rows_are_complete() -> None:
    """Each operation, size and backend has a row with positive, ordered quartiles, and progress reaches its total."""
    seen = []
    rows = bench.run_benchmark(
        2,
        operations=["all_reduce", "ddp_step"],
        sizes=[4096],
        rounds=1,
        progress=lambda done, total, what: seen.append((done, total, what)),
    )
    assert {(row["operation"], row["backend"]) for row in rows} == {
        (operation, backend) for operation in ("all_reduce", "ddp_step") for backend in ("ipc", "gloo", "copy")
    }
    for row in rows:
        assert 0 < row["p25_ms"] <= row["median_ms"] <= row["p75_ms"]
        assert (row["num_bytes"], row["num_ranks"]) == (4096, 2)
    assert seen[-1][0] == seen[-1][1] == 2


def test_a_failing_rank_is_reported_with_its_output() -> None:
    """The error has what the rank printed."""
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        bench.run_benchmark(1, operations=["all_reduce"], sizes=[0], rounds=1)
