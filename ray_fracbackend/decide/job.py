"""Properties of a job that the rows of the decision use, computed once on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ray_fracbackend.decide.device_sharing import ShareGroup, shared_devices
from ray_fracbackend.decide.nccl import NCCL_MULTI_RANK, mig_siblings, multi_rank_obstacle, nccl_conflicts
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import NcclVersion, WorkerInfo, ranks_text


@dataclass(frozen=True)
class Job:
    """Workers and settings of one start.

    Attributes:
        workers: Every rank, in rank order, at least one.
        settings: The user's settings.
        node_gpus: Number of GPUs that Ray has on each node, by Ray's node id; for advice.
        is_asked: Whether this is a user's job; False for a job that tests whether an advice would help.
    """

    workers: Sequence[WorkerInfo]
    settings: Settings
    node_gpus: Mapping[str, float] = field(default_factory=dict)
    is_asked: bool = True

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
    def on_devices(self) -> bool:
        """Whether Ray reserved GPUs and every worker has its own devices."""
        return self.asks_for_gpus and not self.without_cuda

    @cached_property
    def on_windows(self) -> list[int]:
        """Ranks on Windows."""
        return [worker.rank for worker in self.workers if worker.platform == "win32"]

    @cached_property
    def without_cuda(self) -> list[WorkerInfo]:
        """Workers without a CUDA device although Ray reserved one, and workers that report why they have none."""
        return [w for w in self.workers if w.cuda_missing is not None or (w.gpu_fraction > 0 and not w.devices)]

    @property
    def has_gpu_for_each(self) -> bool:
        """Whether Ray has at least as many GPUs as workers, over all nodes."""
        return sum(self.node_gpus.values()) >= len(self.workers)

    @cached_property
    def found_without_cuda(self) -> str:
        """The workers without a CUDA device and the reasons, in one line."""
        ranks = [worker.rank for worker in self.without_cuda]
        causes = dict.fromkeys(
            f"node {w.node_ip}: {w.cuda_missing or 'no CUDA device was found'}" for w in self.without_cuda
        )
        return f"Ray assigned {ranks_text(ranks)} GPUs that torch cannot use ({'; '.join(list(causes)[:4])})"

    @cached_property
    def without_nccl(self) -> list[int]:
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
    def siblings(self) -> tuple[ShareGroup, ...]:
        """Ranks on different MIG slices of one GPU."""
        return mig_siblings(self.workers)

    @cached_property
    def conflicts(self) -> tuple[ShareGroup, ...]:
        """Ranks that share a device and, if NCCL is wanted, ranks that NCCL would refuse."""
        if not self.wants_nccl or self.without_nccl:
            return self.shared
        found = (*self.shared, *nccl_conflicts(self.workers))
        policy = self.settings.on_shared_device
        asked = policy == "nccl" or (
            policy != "error" and self.siblings and multi_rank_obstacle(self.workers, self.siblings) is None
        )
        if not found and asked and all((w.nccl_version or (0,)) >= NCCL_MULTI_RANK for w in self.workers):
            # NCCL's source distinguishes them, but users saw it refuse them without the flags (nccl#1716)
            return self.siblings
        return found

    @cached_property
    def asks_for_multi_rank(self) -> bool:
        """Whether NCCL's flags for several ranks per GPU are requested, by the policy or by the user's variable."""
        if not (self.wants_nccl and self.conflicts):
            return False
        asked = self.settings.on_shared_device == "nccl"
        return asked or multi_rank_obstacle(self.workers, self.conflicts) is None

    @cached_property
    def prohibited(self) -> list[int]:
        """Ranks on a device that no process may use."""
        return [w.rank for w in self.workers if w.devices and w.devices[0].compute_mode == "prohibited"]

    @cached_property
    def exclusive(self) -> tuple[ShareGroup, ...]:
        """Groups that share a device in exclusive-process mode without MPS on all of their ranks."""
        found = []
        for group in self.shared:
            members = [self.workers[rank] for rank in group.ranks]
            # Use the mode of any rank: without NVML some ranks may not know it.
            exclusive = any(member.devices[0].compute_mode == "exclusive_process" for member in members)
            if exclusive and not all(member.mps_reachable for member in members):
                found.append(group)
        return tuple(found)

    @cached_property
    def without_staged(self) -> list[WorkerInfo]:
        """Workers that cannot use the staged backend."""
        return [worker for worker in self.workers if worker.staged_missing]

    @cached_property
    def device_memory_obstacle(self) -> str | None:
        """Why the ipc backend cannot use device memory for these workers, None if it can."""
        for group in self.conflicts:
            if not group.same_device:
                return f"{group.text}, and slices cannot map each other's memory"
        num_devices = len({worker.devices[0].uuid for worker in self.workers if worker.devices})
        if num_devices > 1:
            return f"the workers are on {num_devices} devices, and device memory serves only a group on one"
        for worker in self.workers:
            if worker.ipc_device_memory_missing:
                return f"{worker.where}: {worker.ipc_device_memory_missing}"
        return None

    def shares_by(self, policy: str) -> bool:
        """Whether devices are shared and NCCL is wanted, and ``on_shared_device`` has this value."""
        return self.wants_nccl and bool(self.conflicts) and self.settings.on_shared_device == policy
