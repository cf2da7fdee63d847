"""The emulated CUDA runtime, which all tests of this folder need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.emulated import needs_rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_rig)


@pytest.fixture(scope="session")
def expected() -> list[float]:
    """Return the losses of one process with the whole batches."""
    from tests.gpu.gpu_training import losses_of_one_process

    return losses_of_one_process("cuda")
