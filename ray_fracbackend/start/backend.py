"""The Ray Train backend: probe every worker, decide, start and verify. Runs on the driver or controller.

A start without failures makes two remote calls per worker. Ray keeps one backend instance per process and calls ``on_start``
once per worker group, also after a restart and for several groups at a time: the instance holds no state of a run.
"""

from __future__ import annotations

import copy
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.train.torch import TorchConfig

from ray_fracbackend import _ray
from ray_fracbackend._ray import WorkerGroup
from ray_fracbackend.decide.left_to_ray import left_to_ray
from ray_fracbackend.decide.plain import workers_of
from ray_fracbackend.decide.plan import Decision, StartPlan, WorkerPlan
from ray_fracbackend.decide.rendezvous import NOTE_10049, plan_rendezvous
from ray_fracbackend.decide.settings import Settings, unknown_fields_warning
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import WorkerAddress, WorkerInfo
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.log import logger
from ray_fracbackend.report.file import earlier_start, save_report
from ray_fracbackend.report.start_report import Progress, StartReport, document
from ray_fracbackend.start.collect import gather
from ray_fracbackend.timeouts import Deadline, seconds_text
from ray_fracbackend.worker.group_end import ABORT_S
from ray_fracbackend.worker.probe import probe_worker
from ray_fracbackend.worker.process_group import start_worker
from ray_fracbackend.worker.store import hold_store

# Workers have the same deadline as the driver; this is extra time for their answers to arrive.
_ANSWER_S = 3.0
# How often start_timeout_s the first worker may take for the probe: it may import torch from a cold file system.
_FIRST_ANSWER = 3
# Time for processes of an earlier start of the run to release master_port. With CUDA they take longest to end.
_PORT_WAIT_S = 20.0


class FracTorchBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Start torch process groups for workers that may share CUDA devices. Chosen by FracTorchConfig."""

    def on_start(self, worker_group: WorkerGroup, backend_config: Any) -> None:
        """Start the process group of one worker group.

        Raises:
            FracBackendError: The start failed; the message names rank, node and step.
        """
        settings = backend_config.checked_copy()
        left = left_to_ray(settings.backend, _ray.resources_per_worker(worker_group))
        if left is None:
            if warning := unknown_fields_warning(backend_config, TorchConfig()):
                logger.warning("%s", warning)
            start = Start(worker_group, settings)
            try:
                start.progress.earlier = earlier_start(worker_group)
                report = start.run()
            except BaseException as error:
                _ray.release_workers(worker_group, error)
                if isinstance(error, Exception):
                    path = save_report(worker_group, document(start.progress, error))
                    if isinstance(error, FracBackendError):
                        error.report = path
                from ray_fracbackend.start.failure.merge import as_engine_error

                # Assign it to no variable: the error would keep its frames alive.
                raise as_engine_error(error, worker_group)  # noqa: B904  which has its cause
            start.log(report)
            save_report(worker_group, report.to_dict())
            return
        # The name of an unknown backend may be misspelled.
        logger.log(logging.INFO if settings.backends.is_ours else logging.WARNING, "%s", left)
        # A copy has every field of this Ray version's TorchConfig.
        stock = copy.copy(backend_config)
        stock.backend = None if settings.backends.is_auto else settings.backend
        super().on_start(worker_group, stock)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """On Windows, let the workers copy checkpoint files of the same name one after the other."""
        super().on_training_start(worker_group, backend_config)
        if sys.platform == "win32":
            from ray_fracbackend.checkpoints.turns import copy_checkpoints_in_turn

            worker_group.execute(copy_checkpoints_in_turn)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Shut down the process group. A worker that has lost its GPU fails here, and its process ends anyway.

        Ray 2.51 would end the run with this error, without the error of the train function and without a restart.
        """
        try:
            super().on_shutdown(worker_group, backend_config)
        except RayTaskError as error:
            from ray_fracbackend.decide.error_texts import cause_of

            logger.warning("a worker failed while its process group was shut down: %s", cause_of(error.cause or error))


class Start:
    """One start of one worker group. After a failure end its workers: rank 0's process holds the store of the start open.

    Args:
        worker_group: The worker group.
        settings: A checked copy.
    """

    def __init__(self, worker_group: WorkerGroup, settings: Settings) -> None:
        self._group = worker_group
        self._settings = settings
        self._addresses: list[WorkerAddress] = []
        self._logged: list[str] = []
        self.progress = Progress(settings=settings.to_plain())

    def run(self) -> StartReport:
        """Probe, decide, start; after a failed verification start the fallback.

        Raises:
            FracBackendError: The start failed; the message names rank, node and step, and has the warnings of the plan.
        """
        with self._errors_have_warnings():
            workers = self._probe()
            deadline = Deadline(self._settings.start_timeout_s)
            decision, store_port = decide_start(workers, self._settings), workers[0].network.store_port
            while True:
                try:
                    return self._start(self._plan(decision, workers, store_port), workers, deadline)
                except FracBackendError as error:
                    if not decision.falls_back_from(error):
                        raise
                    logger.debug("%s", error)
                    decision = self.progress.decision = decision.after_failure(error)
                    self._log_warnings()
                    store_port = self._reopen_store(deadline)

    def plan(self) -> StartReport:
        """Probe and decide.

        Raises:
            FracBackendError: The start would fail; the message says why and what to do.
        """
        with self._errors_have_warnings():
            workers = self._probe()
            plan = self._plan(decide_start(workers, self._settings), workers, workers[0].network.store_port)
        return StartReport(plan=plan, workers=workers, settings=self.progress.settings)

    def log(self, report: StartReport) -> None:
        """Log the report in one line, then its hints; the warnings were logged before the wait."""
        # The user allowed training on the CPU, but rarely wants it.
        logger.log(logging.WARNING if report.plan.decision.train_on_cpu else logging.INFO, "%s", report.log_line())
        if report.workers[0].platform == "win32":
            logger.info("%s", NOTE_10049)
        for hint in report.plan.decision.hints:
            logger.info("hint: %s", hint)

    @contextmanager
    def _errors_have_warnings(self) -> Iterator[None]:
        try:
            yield
        except FracBackendError as error:
            error.warnings = tuple(dict.fromkeys((*error.warnings, *self.progress.warnings)))
            raise

    def _log_warnings(self) -> None:
        """Log each warning once, before the wait: it may be the cause of a failure."""
        for warning in self.progress.warnings:
            if warning not in self._logged:
                self._logged.append(warning)
                logger.warning("%s", warning)

    def _probe(self) -> tuple[WorkerInfo, ...]:
        started, settings, limit_s = time.perf_counter(), self._settings, self._settings.start_timeout_s
        self._addresses = _ray.worker_addresses(self._group)
        common = (settings.master_addr, settings.master_port, self._one_node, settings.may_use_shared_memory)
        port_wait_s = min(_PORT_WAIT_S, limit_s / 2)
        refs = self._execute(probe_worker, ((address.rank, *common, port_wait_s) for address in self._addresses))
        deadline = Deadline(_FIRST_ANSWER * limit_s)
        answers = gather(refs, self._addresses, deadline, "probing the workers", since_first_s=limit_s)
        self.progress.workers = workers_of(answers)
        self._add_seconds("probe", started)
        return self.progress.workers

    def _plan(self, decision: Decision, workers: Sequence[WorkerInfo], store_port: int | None) -> StartPlan:
        self.progress.decision = decision
        self.progress.rendezvous = plan_rendezvous(workers, self._settings, decision.backend, store_port)
        return StartPlan(decision, self.progress.rendezvous)

    def _start(self, plan: StartPlan, workers: tuple[WorkerInfo, ...], deadline: Deadline) -> StartReport:
        started, settings = time.perf_counter(), self._settings
        attempt = Deadline(deadline.left_s / 4, deadline.budget_s) if plan.decision.is_trial else deadline
        report = StartReport(plan=plan, workers=workers, settings=self.progress.settings, earlier=self.progress.earlier)
        plans = plan.worker_plans(
            workers,
            settings,
            budget_s=attempt.left_s,
            attempt=secrets.token_hex(4),
            set_distributed_env=not _ray.is_v1(self._group),  # V2's train context has it before the group exists
        )
        reference = [ray.put(report)]  # in a list: Ray fetches a reference that is an argument itself
        step = f"starting {report.backend} at {plan.rendezvous.address}"
        self._log_warnings()
        num_workers = f"{len(workers)} worker{'s' if len(workers) != 1 else ''}"
        then = f", then {plan.decision.fallback}" if plan.decision.is_trial else ""
        logger.info("%s with %s, up to %s s%s", step, num_workers, seconds_text(attempt.left_s), then)
        refs = self._execute(start_worker, ((each, reference) for each in plans))
        slack_s = _ANSWER_S + (0 if set(plan.decision.backends.by_device.values()) == {"gloo"} else ABORT_S)
        try:
            results = gather(refs, self._addresses, attempt, step, slack_s=slack_s)
        except FracBackendError as error:
            # Do not assign it to a variable: the error would keep this frame alive, and the frame the start.
            raise self._explained(error, report, plans, refs) from error.__cause__
        finally:
            self._add_seconds("start", started)
        return report.with_figures(results[0], self.progress.seconds)

    def _reopen_store(self, deadline: Deadline) -> int:
        """Open a store on rank 0 for the fallback, in place of the first attempt's: its end ends what that left in threads."""
        started, settings = time.perf_counter(), self._settings
        one_node, wait_s = self._one_node and settings.master_addr is None, min(_PORT_WAIT_S, deadline.left_s / 2)
        refs = [self._group.execute_single_async(0, hold_store, settings.master_port, one_node, wait_s)]
        (port,) = gather(refs, self._addresses[:1], deadline, "opening a store for the fallback")
        self._add_seconds("probe", started)
        return int(port)

    def _explained(
        self, error: FracBackendError, report: StartReport, plans: Sequence[WorkerPlan], refs: list[Any]
    ) -> FracBackendError:
        """Return the error, explained from the reports of all ranks, and with the fault if it ends the start."""
        from ray_fracbackend.start.failure.explain import explained  # not on the good path
        from ray_fracbackend.start.isolation.search import with_faults

        told = explained(error, report.plan.decision, report.workers, report.rendezvous.master_addr)
        if report.plan.decision.falls_back_from(told) or not self._settings.verify:
            return told
        _, pending = ray.wait(refs, num_returns=len(refs), timeout=0)
        busy = {rank for rank, ref in enumerate(refs) if ref in pending}
        return with_faults(told, self._group, plans, self._addresses, self._settings.start_timeout_s, busy)

    @property
    def _one_node(self) -> bool:
        return len({address.node_id for address in self._addresses}) == 1

    def _execute(self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        return [self._group.execute_single_async(rank, function, *each) for rank, each in enumerate(arguments)]

    def _add_seconds(self, phase: str, started: float) -> None:
        """Add to the time of a phase; a start with a fallback has each phase twice."""
        seconds = self.progress.seconds
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started
