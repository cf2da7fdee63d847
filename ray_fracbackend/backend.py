"""The Ray Train backend: probe every worker, decide, start and verify. Runs where Ray calls it, driver or controller.

Two remote rounds on the good path. Ray keeps one instance of a backend a process and calls ``on_start`` once a worker
group, again after every restart and for several groups side by side: nothing of a run is kept on the instance.
"""

from __future__ import annotations

import copy
import posixpath
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ray

from ray_fracbackend import ray_compat
from ray_fracbackend.errors import (
    FracBackendError,
    GroupFormationError,
    SharedDeviceError,
    VerificationError,
)
from ray_fracbackend.facts import WorkerFacts
from ray_fracbackend.gather import Deadline, gather, raise_for_engine
from ray_fracbackend.libraries import library_env
from ray_fracbackend.nccl_multi_rank import explain_failure
from ray_fracbackend.network import bounded
from ray_fracbackend.options import StartOptions
from ray_fracbackend.plan import asks_for_ipc, left_to_ray, plan_start
from ray_fracbackend.probe import probe_worker
from ray_fracbackend.process_group import StartInstruction, start_worker_of_many
from ray_fracbackend.ray_compat import logger
from ray_fracbackend.rendezvous import plan_rendezvous
from ray_fracbackend.report import StartReport
from ray_fracbackend.start_plan import StartPlan
from ray_fracbackend.verify import VerificationResult

# A start later in the same run, after a failure or a resize, replaces the file.
REPORT_FILE = "start_report.json"
_SAVE_S = 2.0
# Workers keep the same deadline as the driver; this is for their answer to arrive.
_ANSWER_S = 3.0
_SEARCH_FROM_S = 40.0
_NUM_FAULTS = 4


class FracTorchBackend(ray_compat.TorchBackend):  # type: ignore[misc]
    """Starts torch process groups for workers that may share CUDA devices. Chosen by FracTorchConfig."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Starts the process group of one worker group or replica group.

        Raises:
            FracBackendError: The start failed; the message names rank, node and step.
        """
        options = StartOptions.from_config(backend_config)
        reason = left_to_ray(options.backend, ray_compat.resources_per_worker(worker_group))
        if reason is None:
            logged: list[str] = []
            try:
                report = _Start(worker_group, options, logged).run()
            except BaseException as error:
                ray_compat.release_workers(worker_group)
                raise_for_engine(error, worker_group)
            _log(report, logged)
            _save(worker_group, report)
            return
        logger.info("%s", reason)
        # With every field that this Ray's TorchConfig has.
        stock = copy.copy(backend_config)
        stock.backend = None if options.backend == "auto" else options.backend
        super().on_start(worker_group, stock)


class _Start:
    """One start of one worker group."""

    def __init__(self, worker_group: Any, options: StartOptions, logged: list[str]) -> None:
        self._group = worker_group
        self._options = options
        self._logged = logged
        self._addresses = ray_compat.worker_addresses(worker_group)
        self._seconds: dict[str, float] = {}
        # Imports on a cold file system take minutes: they have a bound of their own.
        self.workers = self._probe(Deadline(options.start_timeout_s))
        self._deadline = Deadline(options.start_timeout_s)

    def run(self) -> StartReport:
        plan = plan_start(self.workers, self._options, gpus_by_node() if self._may_share() else None)
        while True:
            try:
                return self._start(plan)
            except (SharedDeviceError, VerificationError) as error:
                if plan.fallback is None:
                    raise
                logger.debug("%s", error)
                plan = plan.after_failure(str(error))
                # Now, and not with the report: the second start may fail too.
                logger.warning("%s", plan.warnings[-1])
                self._logged.append(plan.warnings[-1])
                self.workers = self._probe(self._deadline)  # rank 0 opens a new store

    def _may_share(self) -> bool:
        return any(0 < worker.gpu_fraction < 1 for worker in self.workers)

    def _probe(self, deadline: Deadline) -> tuple[WorkerFacts, ...]:
        started, options = time.perf_counter(), self._options
        one_node = len({address.node_id for address in self._addresses}) == 1
        arguments = (options.master_addr, options.master_port, one_node, asks_for_ipc(options))
        refs = [
            self._group.execute_single_async(rank, probe_worker, rank, *arguments)
            for rank in range(len(self._addresses))
        ]
        facts = gather(refs, self._addresses, deadline, "probing the workers")
        self._seconds["probe"] = time.perf_counter() - started
        return tuple(facts)

    def _start(self, plan: StartPlan) -> StartReport:
        started = time.perf_counter()
        report = self._report(plan)
        source = ray.put(report)
        refs = [
            self._group.execute_single_async(
                worker.rank, start_worker_of_many, self._instruction(worker, report, source)
            )
            for worker in self.workers
        ]
        step = f"starting {plan.backend} at {report.master_addr}:{report.master_port}"
        try:
            results: list[VerificationResult | None] = gather(
                refs, self._addresses, self._deadline, step, slack_s=_ANSWER_S
            )
        except FracBackendError as error:
            told = self._located(explain_failure(error, plan, self.workers), report)
            try:
                if told is error:
                    raise  # an error that is its own cause would send V1 round in circles
                raise told from error
            finally:
                del told  # as in raise_for_engine
        self._seconds["start"] = time.perf_counter() - started
        return replace(report, verification=results[0], seconds=self._seconds)

    def _located(self, error: FracBackendError, report: StartReport) -> FracBackendError:
        """The error of a group that did not form or work, with the ranks, nodes and links at fault."""
        if not isinstance(error, (GroupFormationError, VerificationError)):
            return error
        if report.plan.fallback is not None or not self._options.verify:
            return error
        from ray_fracbackend.isolation_run import find_faults  # not on the good path

        faults = find_faults(self._group, report, self._addresses, self._deadline)
        if not faults:
            return error
        ranks = {rank for fault in faults for rank in fault.ranks} or error.ranks
        found = "; ".join(fault.text for fault in faults[:_NUM_FAULTS])
        return type(error)(f"{error} Search for the fault: {found}.", ranks=ranks)

    def _report(self, plan: StartPlan) -> StartReport:
        rendezvous = plan_rendezvous(self.workers, self._options, plan.backend)
        return StartReport(plan=plan, workers=self.workers, rendezvous=rendezvous)

    def _instruction(self, worker: WorkerFacts, report: StartReport, source: Any) -> StartInstruction:
        options, plan = self._options, report.plan
        # A plan with a way out keeps time for it, and a long one for the search for a fault.
        budget_s = self._deadline.left_s
        if plan.fallback:
            budget_s *= 0.5
        elif options.verify and budget_s > _SEARCH_FROM_S:
            budget_s *= 0.75
        return StartInstruction(
            rank=worker.rank,
            world_size=len(self.workers),
            backend=plan.backend,
            device=plan.device_of(worker),
            rendezvous=report.rendezvous.of(worker.rank),
            timeout_s=options.timeout_s,
            budget_s=max(budget_s, 0.001),
            verify=options.verify,
            train_on_cpu=plan.train_on_cpu and worker.gpu_fraction > 0,
            set_distributed_env=ray_compat.sets_env_before_init(self._group),
            memory_fraction=plan.memory_fraction_of(worker) if options.limit_gpu_memory else None,
            env_defaults={**plan.env_defaults, **library_env(worker, plan)},
            report=source,
        )


def gpus_by_node() -> dict[str, float]:
    """GPUs that Ray gives out on each node, by Ray's node id; empty where Ray does not tell: they are for hints alone."""
    try:
        return {node["NodeID"]: node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]}
    except Exception as error:  # a start does not fail for the sake of a hint
        logger.debug("Ray did not list its nodes: %s", error)
        return {}


def _log(report: StartReport, logged: Collection[str]) -> None:
    logger.info("%s", report.log_line())
    for warning in report.warnings:
        if warning not in logged:
            logger.warning("%s", warning)
    for note in report.rendezvous.notes:
        logger.info("%s", note)
    for hint in report.plan.hints:
        logger.info("hint: %s", hint)
    for hint in report.plan.debug_hints:
        logger.debug("hint: %s", hint)


def _save(worker_group: Any, report: StartReport) -> None:
    """Writes the report beside the run's results; storage that is slow or refuses holds up no start."""

    def write() -> None:
        folder = ray_compat.results_folder(worker_group)
        if folder is not None:
            file_system, path = folder
            file_system.create_dir(path, recursive=True)
            with file_system.open_output_stream(posixpath.join(path, REPORT_FILE)) as stream:
                stream.write(report.to_json().encode())

    try:
        bounded(write, _SAVE_S)
    except Exception as error:  # storage of any kind, with errors of its own
        logger.warning("%s was not written beside the results: %s", REPORT_FILE, error)
