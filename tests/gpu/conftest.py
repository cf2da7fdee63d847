"""Engines of Ray Train that the GPU tests of a session share; and a row for each test, where ci/gpu.sh wants them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.gpu_engine import Engine

# The ranks of the ipc tests.
sys.path.append(str(Path(__file__).parents[1] / "ipc"))
_STEP = os.environ.get("GPU_SUITE_NAME")
if _STEP:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


def _add_row(**row):
    if _STEP:
        from rows import add_row

        add_row(_STEP, row)


def pytest_collection_finish(session: pytest.Session) -> None:
    """How many tests there are."""
    _add_row(num_collected=len(session.items))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What became of a test, as soon as that is known."""
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        _add_row(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), text=reason[-4000:])


@pytest.fixture(scope="session")
def engines():
    """An engine by version, started on first use."""
    from tests.gpu.gpu_engine import Engine

    started: dict[str, Engine] = {}

    def engine(version: str) -> Engine:
        if version not in started:
            started[version] = Engine(version)
        return started[version]

    yield engine
    for one in started.values():
        one.close()
