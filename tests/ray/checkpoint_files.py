"""Two ranks report a checkpoint with the same file name at the same time, with Windows' file sharing; also on Windows itself."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import FracTorchConfig, report_rank0
from ray_fracbackend.checkpoints.turns import copy_checkpoints_in_turn

# Longer than the delay between the ranks after a barrier.
COPY_S = 1.5


def sharing(copy: Any) -> Any:
    """Return pyarrow's copy that refuses a file that another rank is copying, as CopyFileW does (ERROR_SHARING_VIOLATION)."""

    def exclusive(source: str, destination: str, *args: Any, **kwargs: Any) -> None:
        held = []
        Path(destination).mkdir(parents=True, exist_ok=True)
        try:
            for path in Path(source).iterdir() if Path(source).is_dir() else []:
                lock = Path(destination, f".{path.name}.open")
                try:
                    os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    raise PermissionError(
                        13, "[WinError 32] Failed copying: used by another process", str(path)
                    ) from None
                held.append(lock)
            time.sleep(COPY_S)
            copy(source, destination, *args, **kwargs)
        finally:
            for lock in held:
                lock.unlink()

    return exclusive


def train(config: dict[str, str]) -> None:
    if sys.platform != "win32":
        pyarrow.fs.copy_files = sharing(pyarrow.fs.copy_files)
        if config["how"] == "in_turn":
            copy_checkpoints_in_turn()  # as a start does on Windows
    report = report_rank0 if config["how"] == "rank0" else ray.train.report
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"weight": torch.ones(1)}, os.path.join(folder, "model.pt"))
        torch.distributed.barrier()
        report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder))


def fit(how: str, storage: str) -> ray.train.Result:
    """Train with Ray's own config (``stock``), or with FracTorchConfig and ray.train.report (``in_turn``) or report_rank0 (``rank0``)."""
    return TorchTrainer(
        train,
        train_loop_config={"how": how},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig() if how == "stock" else FracTorchConfig(),
        run_config=RunConfig(name=how, storage_path=storage),
    ).fit()
