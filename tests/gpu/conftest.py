"""Engines of Ray Train that the GPU tests of a session share."""

from __future__ import annotations

import pytest

from tests.gpu.gpu_engine import Engine


@pytest.fixture(scope="session")
def engines():
    """An engine by version, started on first use."""
    started: dict[str, Engine] = {}

    def engine(version: str) -> Engine:
        if version not in started:
            started[version] = Engine(version)
        return started[version]

    yield engine
    for one in started.values():
        one.close()
