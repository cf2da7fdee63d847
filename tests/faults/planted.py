"""Plant one real fault in one rank at one step of a Ray Train run, by wrapping the function of that step.

Runs where Ray calls the backend, and on the worker.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray.train
import torch
import torch.distributed as dist

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.start.backend import FracTorchBackend
from tests.faults.cases import PACKAGES, Case

# Events of a run, recorded in its folder.
BEGIN, END, FAULT, TRAINED = "on_start begins", "on_start ends", "fault", "trained"
# If a rank dies while V2 launches the train functions, the run ends in a ControllerError, and Ray keeps the other workers.
_LAUNCHED_S = 2.0
# The function of each step on a worker. The train function is the user's.
_STEPS = {
    "probe": ("ray_fracbackend.worker.probe", "probe_devices"),
    "store": ("ray_fracbackend.worker.process_group", "_prepare"),
    "connect": ("ray_fracbackend.worker.store", "connect_store"),
    "create": ("torch.distributed", "init_process_group"),
    "verify": ("torch.distributed", "all_reduce"),
    "shutdown": ("ray.train.torch.config", "_shutdown_torch"),
}
# Faults of a worker in one of these steps. The others are there before the start begins.
_OF_A_STEP = ("kill", "stop", "raise", "hang", "wrong", "memory", "node")
_BLOCK, _MAX_BLOCKS = 2**28, 32


def note(folder: str, event: str, value: int = 0) -> None:
    """Record an event, with a number such as a rank."""
    with Path(folder, "events").open("a") as file:
        print(json.dumps([event, time.time(), value]), file=file)


def noted(folder: str, event: str) -> list[tuple[float, int]]:
    """Return when an event was recorded, in seconds since the epoch, and its numbers."""
    path = Path(folder, "events")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(when, value) for name, when, value in lines if name == event]


def told_at(folder: str, event: str) -> float | None:
    """Return when an event was recorded first, None if it was not."""
    found = noted(folder, event)
    return found[0][0] if found else None


def strike(fault: str, folder: str, rank: int = 1) -> None:
    """Apply the fault to the calling process; the caller implements ``wrong``."""
    note(folder, FAULT, rank)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise OSError("the disk is on fire")
    if fault == "node":
        _kill_node()
    if fault == "memory":
        _fill_memory()
    if fault != "wrong":
        # Another thread may receive the signal, and this one would continue for a moment: after two fast collectives the run would end.
        time.sleep(3600)


def _kill_node() -> None:
    """Kill all processes of this worker's Ray node."""
    raylet = psutil.Process().parent()
    for process in [raylet, *raylet.children(recursive=True)]:
        if process.pid != os.getpid():
            with suppress(psutil.NoSuchProcess):
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _fill_memory() -> None:
    """Allocate until Ray's memory monitor kills a worker, up to 8 GiB."""
    blocks = []
    while len(blocks) < _MAX_BLOCKS:
        blocks.append(b"1" * _BLOCK)
        time.sleep(0.1)


def plant(case: Case, folder: str, rank: int) -> None:
    """Make the next call of the step's function in this worker fail."""
    module, name = _STEPS[case.step]
    owner = importlib.import_module(module)
    original: Callable[..., Any] = getattr(owner, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        strike(case.fault, folder, rank)
        result = original(*args, **kwargs)
        if case.fault == "wrong":
            result.wait()
            args[0][3] += 1
        return result

    setattr(owner, name, struck)


def node_id() -> str:
    """Return the id of this process's Ray node."""
    found: str = ray.get_runtime_context().get_node_id()
    return found


def train_func(config: dict[str, Any]) -> None:
    """Sum numbers; the fault of the step ``train`` comes in the middle."""
    case, folder = config["case"], config["folder"]
    for step in range(4):
        if step == 2 and case.step == "train" and dist.get_rank() == 1:
            time.sleep(_LAUNCHED_S)
            strike(case.fault, folder)
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert total[0] == dist.get_world_size()
    if dist.get_rank() == 0:
        note(folder, TRAINED, dist.get_world_size())
    ray.train.report({"total": total[0].item()})


class PlantedBackend(FracTorchBackend):
    """Our backend with a fault in its first start or in each."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Plant the fault, import in every worker what the start needs, and start."""
        case, folder = backend_config.case, backend_config.folder
        is_planted = case.is_lasting or told_at(folder, BEGIN) is None
        if case.fault not in PACKAGES:
            worker_group.execute(importlib.import_module, "ray_fracbackend.worker.process_group")
        if is_planted and case.step in _STEPS and case.fault in _OF_A_STEP:
            nodes = worker_group.execute(node_id)
            rank = next((rank for rank, each in enumerate(nodes) if each != node_id()), 1)
            worker_group.execute_single(rank, plant, case, folder, rank)
        note(folder, BEGIN)
        if case.fault not in _OF_A_STEP:
            note(folder, FAULT)
        try:
            super().on_start(worker_group, backend_config)
        finally:
            note(folder, END)


@dataclass
class PlantedConfig(FracTorchConfig):
    """Our configuration with a fault."""

    case: Case | None = None
    folder: str = ""

    @property
    def backend_cls(self) -> type[PlantedBackend]:
        """The backend that plants the fault."""
        return PlantedBackend
