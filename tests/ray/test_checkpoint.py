"""Checkpoints with the same file name from every rank, with Windows' file sharing; also on Windows itself.

Uses the engine of RAY_TRAIN_V2_ENABLED; ci/test.py runs it with both.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ray.checkpoint_files import fit
from tests.ray.conftest import run_example
from tests.ray.starts import TRAINING_FAILED, causes

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.parametrize(
    "how", [pytest.param("in_turn", marks=pytest.mark.full(but="win32")), pytest.param("rank0", marks=pytest.mark.full)]
)
def test_ranks_that_store_one_file_name(how: str, tmp_path: Path) -> None:
    """Every rank reports model.pt without an error if the ranks take turns or only rank 0 reports."""
    result = fit(how, str(tmp_path))
    with result.checkpoint.as_directory() as folder:
        assert [path.name for path in Path(folder).glob("*.pt")] == ["model.pt"]
    assert result.metrics["loss"] == 1.0


@pytest.mark.full
def test_stock_ranks_that_store_one_file_name(tmp_path: Path) -> None:
    """With Ray's own config it ends with WinError 32; therefore the ranks take turns."""
    with pytest.raises(TRAINING_FAILED) as caught:
        fit("stock", str(tmp_path))
    assert "WinError 32" in causes(caught.value)


@pytest.mark.full
def test_the_windows_laptop_example(tmp_path: Path) -> None:
    """Two workers with half a GPU each report a checkpoint with the same name in every epoch: all can be loaded."""
    done = run_example("windows_laptop.py", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loaded the checkpoint of epoch 2: 100% of the digits are right" in done.stdout
    states = [torch.load(path) for path in sorted(tmp_path.rglob("checkpoint.pt"))]
    assert [state["epoch"] for state in states] == [0, 1, 2]
    assert list(tmp_path.rglob("start_report.json"))
