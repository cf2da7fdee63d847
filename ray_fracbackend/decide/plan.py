"""The decision, the plan of the job, and the plan of each worker. Each is immutable.

::

    Decision          table.py   backend, devices, reason, fallback
    StartPlan         + rendezvous.py
    WorkerPlan        one for each rank, with its devices to verify and its time limit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ray_fracbackend.decide.backends import Backends, parse_backend
from ray_fracbackend.decide.device_sharing import ShareGroup, share_text
from ray_fracbackend.decide.rendezvous import Rendezvous, WorkerRendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.errors import (
    FracBackendError,
    GroupFormationError,
    OutOfMemoryError,
    SharedDeviceError,
    StartTimeoutError,
    VerificationError,
)

# Cost of Gloo instead of NCCL for a job on GPUs.
GLOO_COST = "gradients go through host memory and TCP"
# Accelerate on the CPU: without this variable it looks for an accelerator, finds none, and lets every rank train by
# itself. Read in Accelerate 1.15.0, on which transformers.Trainer is built (PartialState._prepare_backend,
# Accelerator.prepare_model).
ACCELERATE_ON_CPU: Mapping[str, str] = {"ACCELERATE_USE_CPU": "true"}
# Without this variable Accelerate passes LOCAL_RANK to DDP as the index of the model's device.
ACCELERATE_ON_SHARED_DEVICE: Mapping[str, str] = {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Backend and devices of one start, with reasons.

    Attributes:
        backend: Name for ``torch.distributed.init_process_group``.
        device_type: ``cuda`` or ``cpu``: the devices for training and for the verification.
        reason: The decision in one line, as logged.
        share_groups: Ranks that share a device, or that NCCL considers to share one.
        env_defaults: Environment variables to set on every worker unless the user set them.
        fallback: Backend to use if ``backend`` fails, None if a failure is final.
        only_if_refused: If True, the fallback is used only if NCCL refuses ranks on one GPU, which all ranks detect at
            once. If False, it is used after any failed verification, and half of the time is reserved for it.
        train_on_cpu: ``ray.train.torch.get_device()`` must return cpu in workers for which Ray reserved GPUs.
        hints: Advice, one line each.
        warnings: Settings that were overridden, costs of the choice, and risks, one line each.
    """

    backend: str
    device_type: str
    reason: str
    share_groups: tuple[ShareGroup, ...] = ()
    env_defaults: Mapping[str, str] = field(default_factory=dict)
    fallback: str | None = None
    only_if_refused: bool = False
    train_on_cpu: bool = False
    hints: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def backends(self) -> Backends:
        """The backend by device type."""
        return parse_backend(self.backend)

    @property
    def is_trial(self) -> bool:
        """Whether the processes continue with the fallback if the verification fails."""
        return self.fallback is not None and not self.only_if_refused

    def falls_back_from(self, error: Exception) -> bool:
        """Return whether the fallback is used after this error of a start."""
        if self.fallback is None:
            return False
        failed = (GroupFormationError, VerificationError, OutOfMemoryError, StartTimeoutError) if self.is_trial else ()
        return isinstance(error, (SharedDeviceError, *failed))

    def after_failure(self, error: FracBackendError) -> Decision:
        """Return the decision for the fallback.

        Args:
            error: Why ``backend`` failed. The warning contains it without the advice, which is about a group that is no
                longer used.

        Raises:
            ValueError: There is no fallback.
        """
        if self.fallback is None:
            raise ValueError(f"no fallback from {self.backend}")
        shared = f"{share_text(self.share_groups)}: " if self.share_groups else ""
        why = f"{self.backend} did not start"
        if isinstance(error, SharedDeviceError):
            why = "NCCL refused the ranks"
        elif isinstance(error, VerificationError):
            why = f"{self.backend} failed its verification"
        warning = f"{shared}{why}, fell back to {self.fallback}, so that {GLOO_COST}: {error.found}"
        return replace(
            self,
            backend=self.fallback,
            reason=f"{shared}using {self.fallback} ({why})",
            fallback=None,
            only_if_refused=False,
            env_defaults={},
            warnings=(*self.warnings, warning),
        )

    def device_of(self, worker: WorkerInfo) -> str:
        """Return the torch device that the worker trains on, such as ``cuda:1``."""
        if self.device_type == "cpu":
            return "cpu"
        # Ray assigned no device: the user's current device.
        return f"cuda:{worker.device.index}" if worker.device is not None else "cuda"

    def memory_fraction_of(self, worker: WorkerInfo) -> float | None:
        """Return the share of its device's memory that a worker may use, from 0 to 1; None for no limit."""
        return worker.gpu_fraction if self.device_type == "cuda" and 0 < worker.gpu_fraction < 1 else None

    def env_of(self, worker: WorkerInfo) -> Mapping[str, str]:
        """Return the job's and the training libraries' variables to set in one worker unless the user set them."""
        if self.device_type == "cpu":
            return {**self.env_defaults, **(ACCELERATE_ON_CPU if worker.gpu_fraction > 0 else {})}
        return {**self.env_defaults, **(ACCELERATE_ON_SHARED_DEVICE if self.share_groups else {})}


@dataclass(frozen=True, kw_only=True)
class StartPlan(Decision):
    """A `Decision` with all its attributes, and the rendezvous of its ranks.

    Attributes:
        rendezvous: Rendezvous of the ranks.
    """

    rendezvous: Rendezvous

    @classmethod
    def of(cls, decision: Decision, rendezvous: Rendezvous) -> StartPlan:
        """Create the plan from a decision."""
        return cls(**{each.name: getattr(decision, each.name) for each in fields(Decision)}, rendezvous=rendezvous)

    def __str__(self) -> str:
        from ray_fracbackend.decide.texts import plan_text

        return plan_text(self)

    def worker_plans(
        self,
        workers: Sequence[WorkerInfo],
        settings: Settings,
        *,
        budget_s: float,
        attempt: str,
        set_distributed_env: bool = False,
        report: Any = None,
    ) -> list[WorkerPlan]:
        """Return the plan of each worker, by rank; the arguments are as in `WorkerPlan`."""
        return [
            WorkerPlan(
                rank=worker.rank,
                world_size=len(workers),
                backend=self.backend,
                device=self.device_of(worker),
                rendezvous=self.rendezvous.of(worker.rank),
                timeout_s=settings.timeout_s,
                budget_s=budget_s,
                attempt=attempt,
                verify=settings.verify,
                is_trial=self.is_trial,
                bind_device=settings.verify
                and self.backends.has_nccl
                and worker.device is not None
                and not self.share_groups,
                train_on_cpu=self.train_on_cpu and worker.gpu_fraction > 0,
                set_distributed_env=set_distributed_env,
                memory_fraction=self.memory_fraction_of(worker) if settings.limit_gpu_memory else None,
                env_defaults=self.env_of(worker),
                report=report,
            )
            for worker in workers
        ]


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """Plan of one worker's start, without the other workers' plans.

    Attributes:
        rank: The worker's rank.
        world_size: Number of workers in the job.
        backend: Name for ``init_process_group``.
        device: torch device that the worker trains on, without an index if Ray assigned none.
        rendezvous: The worker's part of the rendezvous.
        timeout_s: Timeout of the group's collectives during training, in seconds.
        budget_s: Time limit of this worker's start, in seconds.
        attempt: Id of this attempt, the same on all ranks: prefix of its keys in rank 0's store.
        verify: Whether to verify the group.
        is_trial: Whether the process continues with a group of another backend if the verification fails.
        bind_device: Whether to bind the group to the device after the verification, when NCCL is connected, as
            ``init_process_group(device_id=...)`` does.
        train_on_cpu: Whether ``get_device()`` must return cpu, because torch cannot use the GPUs that Ray reserved.
        set_distributed_env: Whether to set RANK, WORLD_SIZE, LOCAL_RANK, ... before ``init_process_group``, as Ray
            Train V2 does.
        memory_fraction: Cap on the process's share of its device's memory, None for no cap.
        env_defaults: Variables to set unless the user set them.
        report: Ray's reference to the start report, fetched only on request; None for a start without Ray.
    """

    rank: int
    world_size: int
    backend: str
    device: str
    rendezvous: WorkerRendezvous
    timeout_s: float
    budget_s: float
    attempt: str
    verify: bool
    is_trial: bool = False
    bind_device: bool = False
    train_on_cpu: bool = False
    set_distributed_env: bool = False
    memory_fraction: float | None = None
    env_defaults: Mapping[str, str] = field(default_factory=dict)
    report: Any = None

    @property
    def backends(self) -> Backends:
        """The backend by device type."""
        return parse_backend(self.backend)

    @property
    def verify_on(self) -> tuple[str, ...]:
        """Devices to verify the group on, one per backend; the worker trains on the last one.

        Only the CPU and devices that Ray assigned are verified. If Ray assigned none, the script chooses its device
        later, and all ranks of a node would use the same current device. Empty without verification, and if the group
        has no backend for any of these devices.
        """
        if not self.verify:
            return ()
        kind, _, index = self.device.partition(":")
        by_device = self.backends.by_device
        own = (self.device,) if kind in by_device and (kind == "cpu" or index) else ()
        other = kind != "cpu" and by_device.get("cpu") not in (None, by_device.get(kind))
        return ("cpu", *own) if other else own
