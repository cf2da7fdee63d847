"""A driver with its own Ray. It runs one fit after the other, each with the fault that a line of its input names.

Started by runs.py with the engine of RAY_TRAIN_V2_ENABLED. It reads settings as one line and writes the user's view as one line.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.exceptions import RayTaskError
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_fracbackend import FracBackendError
from tests.faults.planted import BEGIN, END, FAULT, PlantedFracConfig, PlantedTorchConfig, Planting, told_at, train_func
from tests.processes import left_files, mark_processes, shared_files

_GONE_S = 30.0
# Workers and the helpers of the search for the fault. Ray itself keeps the controller of the last run.
_OURS = re.compile("RayTrainWorker|ray_fracbackend")


def run_cell(planting: Planting, timeout_s: float, folder: str) -> Iterator[dict[str, Any]]:
    """Run one fit with a planted fault.

    Yields:
        First the error of ``fit()``, None if it succeeded, and seconds: from the begin of the first ``on_start`` to the end of ``fit()``,
        and from the fault to there. Then what is left after Ray had time to clean up.
    """
    before = shared_files()
    shared = {"backend": planting.backend, "timeout_s": timeout_s, "planting": planting, "folder": folder}
    if planting.config == "ours":
        config = PlantedFracConfig(start_timeout_s=timeout_s, **shared)
    else:
        config = PlantedTorchConfig(**shared)
    error = None
    try:
        TorchTrainer(
            train_func,
            train_loop_config={"planting": planting, "folder": folder},
            torch_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="run", storage_path=folder),
        ).fit()
    except Exception as caught:
        error = described(caught)
    ended = time.time()
    begun, started, struck = (told_at(folder, event) for event in (BEGIN, END, FAULT))
    yield {
        "error": error,
        "on_start_s": started - begun if begun and started else None,
        "start_s": ended - begun if begun else None,
        "fault_s": ended - struck if struck else None,
    }
    yield {"left": _left(before)}


def described(error: BaseException) -> dict[str, str]:
    """Return the class of the error of ``fit()``, and class and message of its cause: ours, or the root cause."""
    told = list(_told(error))
    cause = next((one for one in told if isinstance(one, FracBackendError)), told[-1])
    if isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    return {"class": type(error).__name__, "cause_class": _class_name(cause), "cause": str(cause).strip()}


def _told(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all of its causes, once each."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop(0)
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        yield one
        failures = getattr(one, "worker_failures", {})  # V2's failures by rank
        left = [getattr(one, "controller_failure", None), *(failures[rank] for rank in sorted(failures)), *left]
        left += [one.__cause__, one.__context__]


def _class_name(error: BaseException) -> str:
    """Return the name without the class that Ray creates from an error and its own."""
    return next(kind.__name__ for kind in type(error).__mro__ if "RayTaskError(" not in kind.__name__)


def _left(before: set[str]) -> list[str]:
    """Return what is left after Ray had time to clean up."""
    end = time.monotonic() + _GONE_S
    while (found := _found(before)) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def _found(before: set[str]) -> list[str]:
    groups = [
        f"placement group {name}"
        for name, group in ray.util.placement_group_table().items()
        if group["state"] != "REMOVED"
    ]
    return [*_processes(), *groups, *(f"/dev/shm/{name}" for name in left_files(before))]


def _processes() -> list[str]:
    """Return processes of runs that have ended, by their titles."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one may end meanwhile
            title = " ".join(process.cmdline()).strip()
            if _OURS.search(title) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(title)
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's output must not mix with the answers
    mark_processes()
    ray.init("local", num_cpus=8, log_to_driver=False, include_dashboard=False)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        for answer in run_cell(Planting(**task["planting"]), task["timeout_s"], task["folder"]):
            print(json.dumps(answer), file=answers, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
