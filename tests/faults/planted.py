"""Plant one real fault in one rank at one step of a Ray Train run, by wrapping the function of that step.

Runs where Ray calls the backend, and on the worker.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.backend import FracTorchBackend

# Events of a run, recorded in its folder.
BEGIN, END, FAULT = "on_start begins", "on_start ends", "fault"
FAULTS = ("kill", "stop", "raise", "hang", "wrong")
# If a rank dies while V2 launches the train functions, the run ends in a ControllerError, and Ray keeps the other workers.
_LAUNCHED_S = 2.0
# The function of each phase on a worker. Stock looks up the address only on rank 0. The train function is the user's.
_STEPS = {
    ("ours", "probe"): ("ray_fracbackend.worker.probe", "probe_devices", 1),
    ("ours", "rendezvous"): ("ray_fracbackend.worker.store", "connect_store", 1),
    ("ours", "init"): ("torch.distributed", "init_process_group", 1),
    ("ours", "verify"): ("torch.distributed", "all_reduce", 1),
    ("ours", "shutdown"): ("ray.train.torch.config", "_shutdown_torch", 1),
    ("stock", "rendezvous"): ("ray.train._internal.utils", "get_address_and_port", 0),
    ("stock", "init"): ("torch.distributed", "init_process_group", 1),
    ("stock", "shutdown"): ("ray.train.torch.config", "_shutdown_torch", 1),
}


@dataclass(frozen=True)
class Planting:
    """A fault and its place.

    Attributes:
        config: ``ours`` or ``stock``.
        backend: Backend of the configuration.
        phase: ``probe``, ``rendezvous``, ``init``, ``verify``, ``train`` or ``shutdown``.
        fault: One of FAULTS.
    """

    config: str
    backend: str
    phase: str
    fault: str

    @property
    def rank(self) -> int:
        """The rank with the fault."""
        return _STEPS.get((self.config, self.phase), ("", "", 1))[2]


def told_at(folder: str, event: str) -> float | None:
    """Return when an event was recorded, in seconds since the epoch, None if it was not."""
    path = Path(folder, event)
    return float(path.read_text()) if path.exists() else None


def _note(folder: str, event: str) -> None:
    # Write it in one step, because other processes poll it.
    path = Path(folder, event)
    draft = path.with_name(f"{event}.{os.getpid()}")
    draft.write_text(repr(time.time()))
    draft.replace(path)


def strike(fault: str, folder: str) -> None:
    """Apply the fault to the calling process; the caller implements ``wrong``."""
    _note(folder, FAULT)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise OSError("the disk is on fire")
    if fault in ("kill", "stop", "hang"):
        # Another thread may receive the signal, and this one would continue for a moment: after two fast collectives the run would end.
        time.sleep(3600)


def plant(planting: Planting, folder: str) -> None:
    """Make the next call of the phase's function in this worker fail."""
    module, name, _ = _STEPS[planting.config, planting.phase]
    owner = importlib.import_module(module)
    original: Callable[..., Any] = getattr(owner, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        strike(planting.fault, folder)
        result = original(*args, **kwargs)
        if planting.fault == "wrong":
            result.wait()
            args[0][3] += 1
        return result

    setattr(owner, name, struck)


def train_func(config: dict[str, Any]) -> None:
    """Sum numbers; the fault of the phase ``train`` comes in the middle."""
    planting, folder = config["planting"], config["folder"]
    for step in range(4):
        if step == 2 and planting.phase == "train" and dist.get_rank() == planting.rank:
            time.sleep(_LAUNCHED_S)
            strike(planting.fault, folder)
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total[0] == dist.get_world_size()
    ray.train.report({"total": total[0].item()})


class _Plants:
    """Before the real start, plant the fault and import in every worker what the start needs."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        planting, folder = backend_config.planting, backend_config.folder
        worker_group.execute(importlib.import_module, "ray_fracbackend.worker.process_group")
        if told_at(folder, BEGIN) is not None:  # the fault has happened, and Ray starts again
            super().on_start(worker_group, backend_config)  # type: ignore[misc]
            return
        if (planting.config, planting.phase) in _STEPS:
            worker_group.execute_single(planting.rank, plant, planting, folder)
        _note(folder, BEGIN)
        try:
            super().on_start(worker_group, backend_config)  # type: ignore[misc]
        finally:
            _note(folder, END)


class PlantedStockBackend(_Plants, TorchConfig().backend_cls):  # type: ignore[misc]
    pass


class PlantedFracBackend(_Plants, FracTorchBackend):
    pass


@dataclass
class PlantedTorchConfig(TorchConfig):  # type: ignore[misc]
    """Stock's configuration with a fault."""

    planting: Planting | None = None
    folder: str = ""

    @property
    def backend_cls(self) -> type[PlantedStockBackend]:
        return PlantedStockBackend


@dataclass
class PlantedFracConfig(FracTorchConfig):
    """Our configuration with a fault."""

    planting: Planting | None = None
    folder: str = ""

    @property
    def backend_cls(self) -> type[PlantedFracBackend]:
        return PlantedFracBackend
