"""Tests that need a GPU; engines of Ray Train that they share in a session; and a row for each test, where ci/gpu.sh wants them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The ranks of the ipc tests.
sys.path.append(str(Path(__file__).parents[1] / "ipc"))
_STEP = os.environ.get("GPU_SUITE_NAME")
if _STEP:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


def _add_row(**row):
    if _STEP:
        from rows import add_row, gpu_state

        add_row(_STEP, {**row, "state": gpu_state()} if _STEP == "faults" else row)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device: torch {torch.__version__} sees none"))


def pytest_collection_finish(session: pytest.Session) -> None:
    _add_row(num_collected=len(session.items))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        _add_row(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), text=reason[-4000:])


@pytest.fixture(scope="session")
def engines():
    from tests.gpu.gpu_engine import engines_by_version

    with engines_by_version() as engine:
        yield engine
