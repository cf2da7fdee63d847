"""The decision, the plan of the job, and the plan of each worker. Each is immutable.

::

    Decision          table.py   backend, devices, reason, fallback
    StartPlan         the decision and the rendezvous of rendezvous.py
    WorkerPlan        one for each rank, with its devices to verify and its time limit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ray_fracbackend.decide.backends import Backends, parse_backend
from ray_fracbackend.decide.device_sharing import ShareGroup, share_text
from ray_fracbackend.decide.rendezvous import Rendezvous
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


class FallBack(str, Enum):
    """When a start goes on with its fallback."""

    NEVER = "never"
    # NCCL refuses ranks as if they shared a GPU, which all ranks detect at once.
    AFTER_REFUSAL = "after a refusal"
    # Half of the time is reserved for the fallback.
    AFTER_FAILURE = "after any failure"


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
        falls_back: When the fallback is used: ``never``, ``after a refusal`` of NCCL or ``after any failure``.
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
    falls_back: FallBack = FallBack.NEVER
    train_on_cpu: bool = False
    hints: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def backends(self) -> Backends:
        """The backend by device type."""
        return parse_backend(self.backend)

    @property
    def is_trial(self) -> bool:
        """Whether the processes go on with the fallback after any failure."""
        return self.falls_back is FallBack.AFTER_FAILURE

    def falls_back_from(self, error: Exception) -> bool:
        """Return whether the fallback is used after this error of a start."""
        if self.is_trial:
            failures = (GroupFormationError, VerificationError, OutOfMemoryError, StartTimeoutError)
            return isinstance(error, (SharedDeviceError, *failures))
        return self.falls_back is FallBack.AFTER_REFUSAL and isinstance(error, SharedDeviceError)

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
            falls_back=FallBack.NEVER,
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


@dataclass(frozen=True)
class StartPlan:
    """The plan of one start.

    Attributes:
        decision: Backend and devices.
        rendezvous: Rendezvous of the ranks.
    """

    decision: Decision
    rendezvous: Rendezvous

    def worker_plans(
        self,
        workers: Sequence[WorkerInfo],
        settings: Settings,
        *,
        budget_s: float,
        attempt: str,
        set_distributed_env: bool = False,
    ) -> list[WorkerPlan]:
        """Return the plan of each worker, by rank; the arguments are as in `WorkerPlan`."""
        decision, rendezvous = self.decision, self.rendezvous
        return [
            WorkerPlan(
                rank=worker.rank,
                world_size=len(workers),
                backend=decision.backend,
                device=decision.device_of(worker),
                master_addr=rendezvous.master_addrs[worker.rank],
                master_port=rendezvous.master_port,
                env=rendezvous.env_of(worker),
                env_defaults=decision.env_of(worker),
                interface=rendezvous.interfaces[worker.rank] if rendezvous.interfaces else None,
                drop_interface=rendezvous.one_node and worker.platform != "win32",
                timeout_s=settings.timeout_s,
                budget_s=budget_s,
                attempt=attempt,
                verify=settings.verify,
                is_trial=decision.is_trial,
                bind_device=settings.verify
                and decision.backends.has_nccl
                and worker.device is not None
                and not decision.share_groups,
                train_on_cpu=decision.train_on_cpu and worker.gpu_fraction > 0,
                set_distributed_env=set_distributed_env,
                memory_fraction=decision.memory_fraction_of(worker) if settings.limit_gpu_memory else None,
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
        master_addr: Address of rank 0's store for this rank, a literal IP without brackets.
        master_port: Port of that store.
        timeout_s: Timeout of the group's collectives during training, in seconds.
        budget_s: Time limit of this worker's start, in seconds.
        attempt: Id of this attempt, the same on all ranks: prefix of its keys in rank 0's store.
        verify: Whether to verify the group.
        env: Variables to set, overriding the user's.
        env_defaults: Variables to set unless the user set them.
        interface: ``GLOO_SOCKET_IFNAME`` to set unless the user set it, `BY_ROUTE` if the worker finds it, None to set none.
        drop_interface: Whether to remove it after the start: on one node it is the loopback interface, over which later
            groups of the train function may not reach all of their ranks.
        is_trial: Whether the process continues with a group of another backend if the verification fails.
        bind_device: Whether to bind the group to the device after the verification, when NCCL is connected, as
            ``init_process_group(device_id=...)`` does.
        train_on_cpu: Whether ``get_device()`` must return cpu, because torch cannot use the GPUs that Ray reserved.
        set_distributed_env: Whether to set RANK, WORLD_SIZE, LOCAL_RANK, ... before ``init_process_group``, as Ray
            Train V2 does.
        memory_fraction: Cap on the process's share of its device's memory, None for no cap.
    """

    rank: int
    world_size: int
    backend: str
    device: str
    master_addr: str
    master_port: int
    timeout_s: float
    budget_s: float
    attempt: str
    verify: bool
    env: Mapping[str, str] = field(default_factory=dict)
    env_defaults: Mapping[str, str] = field(default_factory=dict)
    interface: str | None = None
    drop_interface: bool = False
    is_trial: bool = False
    bind_device: bool = False
    train_on_cpu: bool = False
    set_distributed_env: bool = False
    memory_fraction: float | None = None

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
