"""The outcome of the decision, as one frozen value, and the two ways to build it that all rows use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ray_fracbackend.errors import BackendUnavailableError
from ray_fracbackend.facts import WorkerFacts, ranks_text
from ray_fracbackend.sharing import ShareGroup, share_text

# What a job on GPUs pays where Gloo takes the place of NCCL.
GLOO_COST = "gradients go through host memory and TCP"


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    """What the start will do.

    Attributes:
        backend: Name for ``torch.distributed.init_process_group``.
        device_type: ``cuda`` or ``cpu``: where the workers train and the group is verified.
        reason: The decision in one line, as logged.
        share_groups: Ranks that share a device, or that NCCL takes to share one.
        env_defaults: Environment variables to set on every worker where the user did not.
        fallback: Backend to try when verification of ``backend`` fails, None where a failure is final.
        train_on_cpu: ``ray.train.torch.get_device()`` must say cpu in workers for which Ray reserved GPUs.
        hints: What would be better, one line each.
        debug_hints: The same for the debug log, where they apply to most jobs of a kind.
        warnings: Settings that were overridden, what the choice costs, and doubts, one line each.
    """

    backend: str
    device_type: str
    reason: str
    share_groups: tuple[ShareGroup, ...] = ()
    env_defaults: Mapping[str, str] = field(default_factory=dict)
    fallback: str | None = None
    train_on_cpu: bool = False
    hints: tuple[str, ...] = ()
    debug_hints: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def device_of(self, worker: WorkerFacts) -> str:
        """torch device that the worker trains on, such as ``cuda:1``."""
        if self.device_type == "cpu":
            return "cpu"
        # Without a device of Ray's, the one that the user makes current.
        return f"cuda:{worker.device.index}" if worker.device is not None else "cuda"

    def memory_fraction_of(self, worker: WorkerFacts) -> float | None:
        """Share of its device's memory that a worker may use, in 0 to 1, None for whole devices and for the CPU."""
        return worker.gpu_fraction if self.device_type == "cuda" and 0 < worker.gpu_fraction < 1 else None

    def after_failure(self, cause: str) -> StartPlan:
        """The plan one step down the ladder, or a ValueError where there is none."""
        if self.fallback is None:
            raise ValueError(f"no fallback from {self.backend}")
        who = f"{share_text(self.share_groups)}: " if self.share_groups else ""
        # Its first sentence: the others advise against a group that is not used.
        first = cause.partition(". ")[0]
        warning = (
            f"{who}{self.backend} failed its verification, fell back to {self.fallback}, so that {GLOO_COST}: {first}"
        )
        return replace(
            self,
            backend=self.fallback,
            reason=f"{who}using {self.fallback} ({self.backend} failed its verification)",
            fallback=None,
            env_defaults={},
            warnings=(*self.warnings, warning),
        )


def gloo_plan(
    workers: Sequence[WorkerFacts], reason: str, groups: tuple[ShareGroup, ...] = (), device_type: str = "cuda"
) -> StartPlan:
    """Gloo on all workers, or an error where torch was built without it."""
    for worker in workers:
        if worker.network.gloo_missing:
            raise BackendUnavailableError(
                f"{reason}, but {worker.where}: {worker.network.gloo_missing}.", ranks=(worker.rank,)
            )
    without = [worker.rank for worker in workers if not worker.gloo_available]
    if without:
        raise BackendUnavailableError(
            f"{reason}, but torch of {ranks_text(without)} was built without Gloo. Install a torch build with Gloo.",
            ranks=without,
        )
    return StartPlan(backend="gloo", device_type=device_type, reason=reason, share_groups=groups)


def ipc_host_plan(workers: Sequence[WorkerFacts], asked: str) -> StartPlan:
    """The ipc backend on host memory, or an error that names the first worker that cannot."""
    for worker in workers:
        if worker.ipc_host_memory_missing:
            raise BackendUnavailableError(
                f"{asked}, but the ipc backend cannot be used: {worker.where}: {worker.ipc_host_memory_missing}. "
                "Fix this, or use backend='gloo'.",
                ranks=(worker.rank,),
            )
    return StartPlan(backend="ipc", device_type="cpu", reason=f"{asked}: using ipc on host memory")
