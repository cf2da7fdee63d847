"""Properties of a job that the rows of the decision use, computed once on first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ray_fracbackend.decide.device_sharing import ShareGroup, shared_devices
from ray_fracbackend.decide.nccl import NCCL_MULTI_RANK, asks_for_multi_rank, mig_siblings, nccl_conflicts
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import NcclVersion, WorkerInfo, ranks_text


@dataclass(frozen=True)
class Job:
    """Workers and settings of one start.

    Attributes:
        workers: Every rank, in rank order, at least one.
        settings: The user's settings.
    """

    workers: Sequence[WorkerInfo]
    settings: Settings

    @cached_property
    def wants_nccl(self) -> bool:
        """Whether NCCL should be used if possible."""
        return self.settings.backends.is_auto or self.settings.backends.has_nccl

    @cached_property
    def wants_ipc_on_cpu(self) -> bool:
        """Whether ipc should be used if the workers train on the CPU."""
        backends = self.settings.backends
        return backends.has_ipc or (backends.is_auto and self.settings.on_shared_device == "ipc")

    @cached_property
    def asks_for_gpus(self) -> bool:
        """Whether Ray reserved GPUs for any worker."""
        return any(worker.gpu_fraction > 0 for worker in self.workers)

    @cached_property
    def trains_on_devices(self) -> bool:
        """Whether Ray reserved GPUs and torch can use a device on every worker that has one reserved."""
        return self.asks_for_gpus and not self.workers_without_cuda

    @cached_property
    def windows_ranks(self) -> list[int]:
        """Ranks on Windows."""
        return [worker.rank for worker in self.workers if worker.platform == "win32"]

    @cached_property
    def workers_without_cuda(self) -> list[WorkerInfo]:
        """Workers without a CUDA device although Ray reserved one, and workers that report why they have none."""
        return [w for w in self.workers if w.cuda_missing is not None or (w.gpu_fraction > 0 and not w.devices)]

    @cached_property
    def ranks_without_nccl_or_device(self) -> list[int]:
        """Ranks without NCCL or without a device that torch sees."""
        return [w.rank for w in self.workers if not w.nccl_available or w.num_visible_devices == 0]

    @cached_property
    def missing_cuda_text(self) -> str:
        """The workers without a CUDA device and the reasons, in one line."""
        ranks = [worker.rank for worker in self.workers_without_cuda]
        causes = dict.fromkeys(
            f"node {w.node_ip}: {w.cuda_missing or 'no CUDA device was found'}" for w in self.workers_without_cuda
        )
        return f"Ray assigned {ranks_text(ranks)} GPUs that torch cannot use ({'; '.join(list(causes)[:4])})"

    @cached_property
    def ranks_without_nccl(self) -> list[int]:
        """Ranks whose torch has no NCCL."""
        return [worker.rank for worker in self.workers if not worker.nccl_available]

    @cached_property
    def nccl_versions(self) -> set[NcclVersion]:
        """Known versions of NCCL that the workers have loaded."""
        return {worker.nccl_version for worker in self.workers if worker.nccl_version}

    @cached_property
    def shared(self) -> tuple[ShareGroup, ...]:
        """Ranks that share a device."""
        return shared_devices(self.workers)

    @cached_property
    def conflicts(self) -> tuple[ShareGroup, ...]:
        """Ranks that share a device and, if NCCL is wanted, ranks that NCCL would refuse."""
        if not self.wants_nccl or self.ranks_without_nccl:
            return self.shared
        found, siblings = (*self.shared, *nccl_conflicts(self.workers)), mig_siblings(self.workers)
        policy = self.settings.on_shared_device
        asked = policy == "nccl" or (policy == "auto" and asks_for_multi_rank(self.workers, siblings))
        if not found and asked and all((w.nccl_version or (0,)) >= NCCL_MULTI_RANK for w in self.workers):
            # NCCL's source distinguishes them, but users saw it refuse them without the flags (nccl#1716)
            return siblings
        return found

    @cached_property
    def wants_multi_rank(self) -> bool:
        """Whether NCCL's flags for several ranks per GPU are requested, by the policy or by the user's variable."""
        return self.shares_by("nccl") or (self.shares_by("auto") and asks_for_multi_rank(self.workers, self.conflicts))

    @cached_property
    def exclusive_without_mps(self) -> tuple[ShareGroup, ...]:
        """Groups that share a device in exclusive-process mode without MPS on all of their ranks."""
        return tuple(
            group
            for group in self.shared
            # The mode of any rank: without NVML some ranks may not know it.
            if any(self.workers[rank].devices[0].compute_mode == "exclusive_process" for rank in group.ranks)
            and not all(self.workers[rank].mps_reachable for rank in group.ranks)
        )

    def shares_by(self, policy: str) -> bool:
        """Whether devices are shared and NCCL is wanted, and ``on_shared_device`` has this value."""
        return self.wants_nccl and bool(self.conflicts) and self.settings.on_shared_device == policy
