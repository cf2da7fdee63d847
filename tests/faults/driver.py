"""A driver with its own Ray. It runs one fit after the other, each with the fault that a line of its input names.

Started by runs.py with the engine of RAY_TRAIN_V2_ENABLED and the Ray to start as argument, one of RAYS. It reads settings as one line and
writes the user's view as one line.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayTaskError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune import Tuner

import ray_fracbackend
from ray_fracbackend import FracBackendError
from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.report.file import REPORT_FILE
from tests.faults.callbacks import HOOK, Raising
from tests.faults.cases import Case
from tests.faults.planted import BEGIN, END, FAULT, TRAINED, PlantedConfig, noted, told_at, train_func
from tests.processes import left_files, mark_processes, shared_files

RAYS = ("one node", "two nodes", "other version", "no package", "state tracking", "little memory")
_GONE_S = 15.0
# Workers and other processes of the package. Ray itself keeps the controller of the last run.
_OURS = re.compile("RayTrainWorker|ray_fracbackend")
# What Ray's memory monitor lets the machine use more than now: enough for the workers, less than one allocates.
_SPARE = 4 * 2**30
_HEAD = "head"


def start_ray(kind: str, folder: str) -> None:
    """Start Ray on this machine: one node or two, which may have another version of the package, or none, on the second one."""
    os.environ["RAY_TRAIN_ENABLE_STATE_TRACKING"] = str(int(kind == "state tracking"))
    resources = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False}
    if kind in ("two nodes", "other version", "no package"):
        cluster = Cluster(initialize_head=True, head_node_args={**resources, "resources": {_HEAD: 1}})
        path = os.environ["PYTHONPATH"]
        if kind != "two nodes":
            path = os.pathsep.join([other_package(folder, kind), path])
        cluster.add_node(**resources, env_vars={"PYTHONPATH": path})
        ray.init(address=cluster.address, log_to_driver=False)
        return
    config = {}
    if kind == "little memory":
        memory = psutil.virtual_memory()
        limit = (memory.total - memory.available + _SPARE) / memory.total
        config = {"memory_usage_threshold": limit, "memory_monitor_refresh_ms": 100}
    ray.init("local", **resources, resources={_HEAD: 1}, log_to_driver=False, _system_config=config)


def other_package(folder: str, kind: str) -> str:
    """Write a copy of the package with another version, or what an import finds without the package; return its folder."""
    package = Path(folder, "other", "ray_fracbackend")  # Ray adds the driver's own folder to the path of every worker
    if kind == "other version":
        shutil.copytree(Path(ray_fracbackend.__file__).parent, package)
        file = package / "__init__.py"
        file.write_text(file.read_text().replace(f'"{ray_fracbackend.__version__}"', '"0.0.1"'))
    else:
        package.mkdir(parents=True)
        name = package.name
        (package / "__init__.py").write_text(f'raise ModuleNotFoundError("No module named {name!r}", name={name!r})\n')
    return str(package.parent)


def run_case(case: Case, timeout_s: float, folder: str) -> Iterator[dict[str, Any]]:
    """Run one fit with a planted fault.

    Yields:
        First the error of ``fit()``, None if it succeeded; the number of starts; the size of the group that trained; seconds of the first
        start, and from the fault to the end of ``fit()``; the error in the report of the last start; for a run that was started again its
        error; and what Ray recorded of each attempt. Then what is left after Ray had time to clean up.
    """
    before, error, again = (shared_files(), listening()), None, None
    called = time.time()
    with ExitStack() as stack:
        try:
            fit(case, timeout_s, folder, stack)
        except Exception as caught:
            error = described(caught)
        ended = time.time()
        report = reported(folder)
        if case.is_repeated:
            try:
                fit_again(case, timeout_s, folder, stack)
            except Exception as caught:
                again = described(caught)
    begun, started, struck = (told_at(folder, event) for event in (BEGIN, END, FAULT))
    yield {
        "error": error,
        "starts": len(noted(folder, BEGIN)),
        "struck": [rank for _, rank in noted(folder, FAULT)],
        "trained": [size for _, size in noted(folder, TRAINED)],
        "start_s": started - begun if begun and started else None,
        "fault_s": ended - (struck or called),
        "report": report,
        "again": again,
        "attempts": attempts(Path(folder).name) if v2_enabled() else None,
    }
    yield {"left": _left(*before)}


def trainer_of(case: Case, timeout_s: float, folder: str, stack: ExitStack) -> TorchTrainer:
    """Return the trainer of a case."""
    settings: dict[str, Any] = {"num_workers": (1, 2) if case.is_elastic else 2, "placement_strategy": "SPREAD"}
    if not v2_enabled():
        settings["trainer_resources"] = {_HEAD: 0.1}  # V2's controller is on the driver's node anyway
    if case.is_elastic:
        settings["resources_per_worker"] = {"CPU": 3}  # a node has room for one
    if case.fault == "device":
        settings |= {"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}
    limits: dict[str, int] = {"max_failures": case.max_failures}
    if v2_enabled():
        limits["controller_failure_limit"] = case.controller_failure_limit
    config = PlantedConfig(
        backend="auto" if case.fault == "device" else case.backend,
        start_timeout_s=timeout_s,
        timeout_s=timeout_s,
        case=case,
        folder=folder,
    )
    if case.fault == "port":
        config.master_port = stack.enter_context(socket.create_server(("", 0))).getsockname()[1]
    return TorchTrainer(
        train_func,
        train_loop_config={"case": case, "folder": folder},
        torch_config=config,
        scaling_config=ScalingConfig(**settings),
        run_config=RunConfig(
            name=Path(folder).name,
            storage_path=folder,
            failure_config=FailureConfig(**limits),
            callbacks=[Raising(case.hook)] if case.hook and not case.is_first else None,
        ),
    )


def fit(case: Case, timeout_s: float, folder: str, stack: ExitStack) -> None:
    """Run the case; V1 with its Tuner if the run is to be restored."""
    os.environ["RAY_TRAIN_CALLBACKS"] = f"{Raising.__module__}.{Raising.__name__}" if case.is_first else ""
    os.environ[HOOK] = case.hook
    trainer = trainer_of(case, timeout_s, folder, stack)
    if v2_enabled() or not case.is_repeated:
        trainer.fit()
    else:
        _raise_first(Tuner(trainer).fit())


def fit_again(case: Case, timeout_s: float, folder: str, stack: ExitStack) -> None:
    """Run a case again that has failed."""
    trainer = trainer_of(case, timeout_s, folder, stack)
    if v2_enabled():
        trainer.fit()
    else:
        path = str(Path(folder, Path(folder).name))
        _raise_first(Tuner.restore(path, trainable=trainer, resume_errored=True).fit())


def _raise_first(results: Any) -> None:
    for error in results.errors:
        raise error


def described(error: BaseException) -> dict[str, Any]:
    """Return the class of the error of ``fit()``, and class, message and ranks of its cause: ours, or the root cause."""
    told = list(_told(error))
    cause = next((one for one in told if isinstance(one, FracBackendError)), told[-1])
    if isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    return {
        "class": type(error).__name__,
        "cause_class": _class_name(cause),
        "cause": str(cause).strip(),
        "ranks": list(cause.ranks) if isinstance(cause, FracBackendError) else None,
    }


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


def reported(folder: str) -> dict[str, Any] | None:
    """Return the error in the newest start report of a run, empty if the start succeeded; None without a report."""
    files = sorted(Path(folder).rglob(REPORT_FILE), key=lambda path: path.stat().st_mtime)
    return (json.loads(files[-1].read_text()).get("error") or {}) if files else None


def attempts(run: str) -> list[tuple[str, str]] | None:
    """Return status and detail of each attempt of a V2 run, None if Ray does not track it."""
    from ray.train.v2._internal.state.state_actor import get_state_actor

    actor = get_state_actor()
    if actor is None:
        return None
    names = {run_id: each.name for run_id, each in ray.get(actor.get_train_runs.remote()).items()}
    found = ray.get(actor.get_train_run_attempts.remote())
    return [
        (attempt.status.name, attempt.status_detail or "")
        for run_id, of_run in found.items()
        if names.get(run_id) == run
        for attempt in of_run.values()
    ]


def _left(files: set[str], sockets: dict[str, set[int]]) -> list[str]:
    """Return what is left after Ray had time to clean up."""
    end = time.monotonic() + _GONE_S
    while (found := _found(files, sockets)) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def _found(files: set[str], sockets: dict[str, set[int]]) -> list[str]:
    groups = [
        f"placement group {name}"
        for name, group in ray.util.placement_group_table().items()
        if group["state"] != "REMOVED"
    ]
    total, free = ray.cluster_resources(), ray.available_resources()
    taken = [f"{total[name] - free.get(name, 0):g} {name}" for name in ("CPU", "GPU") if free.get(name) != total[name]]
    new = [
        f"sockets of {process}: {ports}"
        for process, ports in listening().items()
        if _has_new(ports, sockets.get(process))
    ]
    return [*_processes(), *groups, *taken, *new, *(f"/dev/shm/{name}" for name in left_files(files))]


def _processes() -> list[str]:
    """Return processes of runs that have ended, by their titles."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one may end meanwhile
            title = " ".join(process.cmdline()).strip()
            if _OURS.search(title) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(title)
    return found


def listening() -> dict[str, set[int]]:
    """Return the ports on which processes of this program listen, by process."""
    found = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            name = f"{process.pid} {' '.join(process.cmdline()).strip()[:40]}"
            found[name] = {
                each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN
            }
    return found


def _has_new(ports: set[int], before: set[int] | None) -> bool:
    """Return whether a process listens on more ports than before; each new process of Ray has one port of its own."""
    return len(ports) > 1 if before is None else bool(ports - before)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's output must not mix with the answers
    mark_processes()
    start_ray(sys.argv[1], os.getcwd())
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        for answer in run_case(Case(**task["case"]), task["timeout_s"], task["folder"]):
            print(json.dumps(answer), file=answers, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
