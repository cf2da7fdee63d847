"""Advice on placement, fractions and device indices. A hint never changes a decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ray_fracbackend.decide.backends import parse_backend
from ray_fracbackend.decide.device_sharing import ShareGroup
from ray_fracbackend.decide.fractions import largest_fraction, workers_per_gpu
from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.nccl import MULTI_RANK_ENV, multi_rank_obstacle
from ray_fracbackend.decide.plan import GLOO_COST
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text

# Remainder caused by rounding 1/k.
_NO_UNUSED_GPU = 0.01
# Part of a GPU that a worker's CUDA context may need, which limit_gpu_memory does not count: 0.5 GB of 8 GB.
_CONTEXT_FRACTION = 0.0625


def device_hints(job: Job, backend: str, groups: tuple[ShareGroup, ...], warnings: tuple[str, ...]) -> tuple[str, ...]:
    """Return hints on placement, fractions and device indices for a job on CUDA devices, at most one per subject.

    Args:
        job: The job; a node that is missing in its ``node_gpus`` gets no hint on placement.
        backend: The chosen backend.
        groups: Ranks that share a device.
        warnings: Warnings of the decision.
    """
    if not job.is_asked:
        return ()
    workers = job.workers
    # A warning about the cost of sharing already contains this advice.
    is_told = any(GLOO_COST in warning for warning in warnings)
    spread = _spread(workers, groups, job.node_gpus) if job.has_gpu_for_each and not is_told else None
    found = [
        spread,
        _fraction(workers, job.settings.limit_gpu_memory),
        _local_rank(workers),
        _one_host(workers),
        _multi_rank(workers, backend, groups),
    ]
    return tuple(hint for hint in found if hint)


def reservation_hints(job: Job) -> tuple[str, ...]:
    """Return a hint if the train function of a job without GPUs can use some; Ray 2.60 does not hide them."""
    sees = [worker.rank for worker in job.workers if worker.num_visible_devices > 0]
    if job.asks_for_gpus or not sees or not job.settings.backends.is_auto:
        return ()
    return (
        f"{ranks_text(sees)} can use GPUs that Ray did not reserve, and torch.cuda.is_available() is True in the train function: "
        "ScalingConfig(use_gpu=True) reserves them, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1 hides them",
    )


def _spread(workers: Sequence[WorkerInfo], groups: Sequence[ShareGroup], node_gpus: Mapping[str, float]) -> str | None:
    if not groups or workers[0].gpu_fraction >= 1:
        return None
    num_ranks: dict[str, int] = defaultdict(int)
    for worker in workers:
        num_ranks[worker.node_id] += 1
    for group in groups:
        first = workers[group.ranks[0]]
        # Ray's num_gpus; the node may have more GPUs.
        gpus = node_gpus.get(first.node_id, 0)
        if len(group.nodes) == 1 and group.same_device and gpus >= num_ranks[first.node_id]:
            return (
                f"Ray has {gpus:g} GPUs on node {first.node_ip} and placed {ranks_text(group.ranks)} on one of them; "
                "request more than half a GPU per worker to use NCCL"
            )
    return None


def _fraction(workers: Sequence[WorkerInfo], limit_gpu_memory: bool) -> str | None:
    fraction = workers[0].gpu_fraction
    if not 0 < fraction < 1:
        return None
    count = workers_per_gpu(fraction)
    unused = 1 - count * fraction
    # With a cap on memory the rest is not unused: the CUDA contexts need it.
    contexts = count * _CONTEXT_FRACTION if limit_gpu_memory else 0.0
    if unused < _NO_UNUSED_GPU + contexts:
        return None
    return (
        f"with {fraction:g} GPU per worker, {count} fit{'s' if count == 1 else ''} on one GPU and {unused:.2g} of it stays unused, because "
        f"Ray does not split a worker across GPUs; with {largest_fraction(count + 1):g} GPU per worker, {count + 1} would fit"
    )


def _local_rank(workers: Sequence[WorkerInfo]) -> str | None:
    """Find the first rank whose local rank is not its device index; CUDA itself reports an invalid index."""
    local_ranks: dict[str, int] = defaultdict(int)
    for worker in workers:
        local_rank = local_ranks[worker.node_id]
        local_ranks[worker.node_id] += 1
        if worker.device is None or local_rank >= worker.num_visible_devices:
            continue
        if local_rank != worker.device.index:
            return (
                f"LOCAL_RANK {local_rank} is not the device of rank {worker.rank} on node {worker.node_ip}, which is "
                f"cuda:{worker.device.index}; use ray.train.torch.get_device()"
            )
    return None


def _one_host(workers: Sequence[WorkerInfo]) -> str | None:
    """Find Ray nodes on one machine: Ray counts local ranks by node, DeepSpeed by host name (ray#37212)."""
    nodes: dict[str, dict[str, str]] = defaultdict(dict)
    for worker in workers:
        nodes[f"{worker.hostname}\0{worker.boot_id}"][worker.node_id] = worker.hostname
    several = next((found for found in nodes.values() if len(found) > 1), None)
    if several is None:
        return None
    return (
        f"{len(several)} Ray nodes are on host {next(iter(several.values()))}: LOCAL_RANK counts the ranks of each Ray node, and a library "
        "that counts by host name, such as DeepSpeed, uses other numbers; use ray.train.torch.get_device()"
    )


def _multi_rank(workers: Sequence[WorkerInfo], backend: str, groups: tuple[ShareGroup, ...]) -> str | None:
    ranks = [rank for group in groups for rank in group.ranks]
    if parse_backend(backend).has_nccl or not any(workers[rank].env.get(MULTI_RANK_ENV) == "1" for rank in ranks):
        return None
    why = multi_rank_obstacle(workers, groups) or f"{backend} was requested"
    return f"{MULTI_RANK_ENV}=1 has no effect: {why}"
