"""The Ray Train backend: probe every worker, decide, start and verify. Runs on the driver or controller.

Two remote rounds on the good path. Ray keeps one instance of a backend a process and calls ``on_start`` once a worker
group, again after every restart and for several groups side by side: nothing of a run is kept on the instance.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import posixpath
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.train.torch import TorchConfig

from ray_fracbackend import _ray
from ray_fracbackend._ray import logger
from ray_fracbackend.collect import gather, raise_for_engine
from ray_fracbackend.decide import decide_start, with_rendezvous
from ray_fracbackend.decide.nccl import cause_of, explain_failure
from ray_fracbackend.decide.plan import StartPlan, WorkerPlan
from ray_fracbackend.decide.rendezvous import explain_unreachable
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import asks_for_ipc, left_to_ray
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.errors import (
    FracBackendError,
    GroupFormationError,
    VerificationError,
)
from ray_fracbackend.report import StartReport, failed_start
from ray_fracbackend.timeouts import Deadline, bounded
from ray_fracbackend.worker.probe import probe_worker
from ray_fracbackend.worker.process_group import ABORT_S, start_worker

# A start later in the same run, after a failure or a resize, replaces the file.
REPORT_FILE = "start_report.json"
_SAVE_S = 2.0
# Workers keep the same deadline as the driver; this is for their answer to arrive.
_ANSWER_S = 3.0
# The search for a fault takes what is left of the start, or this part of it from its end on, and no longer than this.
_SEARCH_PART = 0.25
_SEARCH_S = 60.0
# For the processes of an earlier start of the run to give master_port back: ending takes longest with CUDA.
_PORT_WAIT_S = 20.0
_NUM_FAULTS = 4


class FracTorchBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Start torch process groups for workers that may share CUDA devices. Chosen by FracTorchConfig."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Start the process group of one worker group.

        Raises:
            FracBackendError: The start failed; the message names rank, node and step.
        """
        settings = backend_config.checked_copy()
        left = left_to_ray(settings.backend, _ray.resources_per_worker(worker_group))
        if left is None:
            start = None
            try:
                start = _Start(worker_group, settings)
                report = start.run()
            except BaseException as error:
                _ray.release_workers(worker_group)
                if start is not None and isinstance(error, Exception):
                    start.warn()
                    _save(worker_group, start.failed_report(error))
                raise_for_engine(error, worker_group)
                raise
            start.log(report)
            _save(worker_group, report.to_dict())
            return
        logger.log(logging.WARNING if left.is_slip else logging.INFO, "%s", left.reason)
        # With every field that this Ray's TorchConfig has.
        stock = copy.copy(backend_config)
        stock.backend = None if settings.backends.is_auto else settings.backend
        super().on_start(worker_group, stock)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Shut the process group down. A worker that has lost its GPU fails in that, and its process ends anyway.

        Ray 2.51 would end the run with that error, without the train function's and without a restart.
        """
        try:
            super().on_shutdown(worker_group, backend_config)
        except RayTaskError as error:
            logger.warning("a worker failed while its process group was shut down: %s", cause_of(error.cause or error))


def start_group(worker_group: Any, settings: Settings) -> StartReport:
    """Start the process group of workers that are no run of Ray Train, such as those of ``ray-fracbackend test``.

    Args:
        worker_group: Has ``workers``, ``execute_single_async``, ``execute_async`` and ``get_resources_per_worker`` of Ray
            Train's V1 worker groups.
        settings: A checked copy.

    Raises:
        FracBackendError: The start failed; the message names rank, node and step. Workers that are busy with it are killed.
    """
    start = _Start(worker_group, settings)
    try:
        return start.run()
    except BaseException:
        _ray.release_workers(worker_group)
        start.warn()
        raise


def plan_group(worker_group: Any, settings: Settings) -> StartReport:
    """Plan the start of such workers, without starting them.

    Args:
        worker_group: As for `start_group`.
        settings: A checked copy.

    Raises:
        FracBackendError: The start would fail; the message says why and what to do.
    """
    return _Start(worker_group, settings).plan()


class _Start:
    """One start of one worker group."""

    def __init__(self, worker_group: Any, settings: Settings) -> None:
        self._group = worker_group
        self._settings = settings
        self._addresses = _ray.worker_addresses(worker_group)
        self._seconds: dict[str, float] = {}
        self._logged: list[str] = []
        self._workers: tuple[WorkerInfo, ...] = ()
        self._plan: StartPlan | None = None

    def run(self) -> StartReport:
        """Probe, decide, start; after a failed verification start the fallback."""
        # Imports on a cold file system take minutes: they have a bound of their own.
        workers = self._probe(Deadline(self._settings.start_timeout_s))
        deadline = Deadline(self._settings.start_timeout_s)
        plan, worker_plans = self._decide(workers)
        while True:
            try:
                return self._start(self._report(plan, workers), worker_plans, deadline)
            except FracBackendError as error:
                if not plan.falls_back_from(error):
                    raise
                logger.debug("%s", error)
                plan = plan.after_failure(error)
                # Now, and not with the report: the second start may fail too.
                logger.warning("%s", plan.warnings[-1])
                self._logged.append(plan.warnings[-1])
                workers = self._probe(deadline)  # rank 0 opens a new store
                plan, worker_plans = with_rendezvous(plan, workers, self._settings)

    def plan(self) -> StartReport:
        """Probe and decide."""
        workers = self._probe(Deadline(self._settings.start_timeout_s))
        plan, _ = self._decide(workers)
        return self._report(plan, workers)

    def failed_report(self, error: Exception) -> dict[str, Any]:
        """Return the report of a start that failed, with what was known by then, as plain values."""
        return failed_start(error, self._settings, self._workers, self._plan, self._seconds)

    def _decide(self, workers: tuple[WorkerInfo, ...]) -> tuple[StartPlan, list[WorkerPlan]]:
        may_share = any(0 < worker.gpu_fraction < 1 for worker in workers)
        return decide_start(workers, self._settings, _gpus_by_node() if may_share else None)

    def _report(self, plan: StartPlan, workers: tuple[WorkerInfo, ...]) -> StartReport:
        self._plan = plan
        return StartReport(plan=plan, workers=workers, settings=self._settings.to_plain())

    def warn(self) -> None:
        """Log the warnings of the plan, of a start that fails too: one of them may be the cause."""
        plan = self._plan
        for warning in (*plan.warnings, *(plan.rendezvous.warnings if plan.rendezvous else ())) if plan else ():
            if warning not in self._logged:
                self._logged.append(warning)
                logger.warning("%s", warning)

    def log(self, report: StartReport) -> None:
        """Log the report in one line, then its warnings, notes and hints."""
        # Training on the CPU is what was allowed, and seldom what is wanted.
        logger.log(logging.WARNING if report.plan.train_on_cpu else logging.INFO, "%s", report.log_line())
        self.warn()
        for note in report.rendezvous.notes:
            logger.info("%s", note)
        for hint in report.plan.hints:
            logger.info("hint: %s", hint)
        for hint in report.plan.debug_hints:
            logger.debug("hint: %s", hint)

    def _execute(self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        return [self._group.execute_single_async(rank, function, *each) for rank, each in enumerate(arguments)]

    def _probe(self, deadline: Deadline) -> tuple[WorkerInfo, ...]:
        started, settings = time.perf_counter(), self._settings
        one_node = len({address.node_id for address in self._addresses}) == 1
        port_wait_s = min(_PORT_WAIT_S, deadline.left_s / 2)
        common = (settings.master_addr, settings.master_port, one_node, asks_for_ipc(settings), port_wait_s)
        refs = self._execute(probe_worker, ((address.rank, *common) for address in self._addresses))
        workers = gather(refs, self._addresses, deadline, "probing the workers")
        self._add_seconds("probe", started)
        self._workers = tuple(workers)
        return self._workers

    def _start(self, report: StartReport, plans: Sequence[WorkerPlan], deadline: Deadline) -> StartReport:
        started, plan = time.perf_counter(), report.plan
        if plan.is_trial:
            deadline = deadline.share(0.5)
        common = {
            "budget_s": deadline.left_s,
            "set_distributed_env": _ray.sets_env_before_init(self._group),
            "report": ray.put(report),
        }
        refs = self._execute(start_worker, ((replace(each, **common),) for each in plans))
        step = f"starting {plan.backend} at {report.master_addr}:{report.master_port}"
        try:
            slack_s = _ANSWER_S + (0 if set(plan.backends.by_device.values()) == {"gloo"} else ABORT_S)
            results = gather(refs, self._addresses, deadline, step, slack_s=slack_s)
        except FracBackendError as error:
            # Not kept in a variable here: its frame would be kept by the error, and the start by the frame.
            raise self._explained(error, report, plans, deadline) from error.__cause__
        finally:
            self._add_seconds("start", started)
        return replace(report, verification=results[0], seconds=self._seconds)

    def _add_seconds(self, phase: str, started: float) -> None:
        """Add to a phase, which a start with a fallback goes through twice."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def _explained(
        self, error: FracBackendError, report: StartReport, plans: Sequence[WorkerPlan], deadline: Deadline
    ) -> FracBackendError:
        """Return the error with what all ranks together tell, and with the fault where the error ends the start."""
        explained = explain_failure(error, report.plan, report.workers)
        explained = explain_unreachable(explained, report.workers, report.master_addr)
        return explained if report.plan.falls_back_from(explained) else self._located(explained, plans, deadline)

    def _located(self, error: FracBackendError, plans: Sequence[WorkerPlan], deadline: Deadline) -> FracBackendError:
        """Add the ranks, nodes and links at fault to the error of a group that did not form or failed its verification."""
        if not isinstance(error, (GroupFormationError, VerificationError)) or not self._settings.verify:
            return error
        from ray_fracbackend.isolation.search import find_faults  # not on the good path

        search_s = min(_SEARCH_S, max(deadline.left_s, self._settings.start_timeout_s * _SEARCH_PART))
        faults = find_faults(self._group, plans, self._addresses, Deadline(search_s))
        if not faults:
            return error
        ranks = {rank for fault in faults for rank in fault.ranks} or error.ranks
        found = "; ".join(fault.text for fault in faults[:_NUM_FAULTS])
        return type(error)(f"{error} Search for the fault: {found}.", ranks=ranks)


def _gpus_by_node() -> dict[str, float]:
    """Return num_gpus of each node by Ray's node id; empty where Ray does not answer. Used for hints only."""
    try:
        return {node["NodeID"]: node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]}
    except Exception as error:  # a start does not fail for the sake of a hint
        logger.debug("Ray did not list its nodes: %s", error)
        return {}


# Number of the newest report by its folder, in this process: all starts of a run are in one.
_NEWEST: dict[str, int] = {}
_NUMBERS = itertools.count()


def _save(worker_group: Any, report: dict[str, Any]) -> None:
    """Write the report beside the run's results. Slow storage delays the start by seconds, and failing storage does not fail it."""
    number = next(_NUMBERS)

    def write() -> None:
        folder = _ray.results_folder(worker_group)
        if folder is not None:
            file_system, path = folder
            _NEWEST[path] = max(number, _NEWEST.get(path, 0))
            file_system.create_dir(path, recursive=True)
            if _NEWEST[path] > number:
                return  # the storage took so long that a later start has reported
            with file_system.open_output_stream(posixpath.join(path, REPORT_FILE)) as stream:
                stream.write(json.dumps(report, indent=2).encode())

    try:
        bounded(write, _SAVE_S)
    except TimeoutError:
        logger.warning(
            "%s is not written beside the results yet, after %g s: the storage is slow", REPORT_FILE, _SAVE_S
        )
    except Exception as error:  # storage of any kind, with errors of its own
        logger.warning("%s was not written beside the results: %s", REPORT_FILE, error)
