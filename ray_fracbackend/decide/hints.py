"""Advice on placement, fractions and device indices. A hint never changes a decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray_fracbackend.decide.capacity import largest_fraction, workers_per_gpu
from ray_fracbackend.decide.device_sharing import ShareGroup
from ray_fracbackend.decide.nccl import MULTI_RANK_ENV, multi_rank_obstacle
from ray_fracbackend.decide.plan import GLOO_COST, StartPlan
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text

# What rounding of 1/k leaves.
_NO_UNUSED_GPU = 0.01


def add_hints(plan: StartPlan, workers: Sequence[WorkerInfo], node_gpus: Mapping[str, float]) -> StartPlan:
    """Add advice on placement, fractions and device indices to a plan, at most one line a subject.

    Args:
        plan: The decision.
        workers: Every rank, in rank order.
        node_gpus: num_gpus of each node by Ray's node id; without an entry there is no advice on placement.
    """
    another, beyond = _local_ranks(workers)
    # A warning that says what sharing costs has this advice already.
    is_told = any(GLOO_COST in warning for warning in plan.warnings)
    spread = None if is_told else _spread(workers, plan.share_groups, node_gpus)
    hints = [spread, _fraction(workers), another, _one_host(workers), _multi_rank(workers, plan)]
    return replace(
        plan,
        hints=tuple(hint for hint in hints if hint),
        # Applies to every job whose ranks share a device; where it matters, CUDA raises an error.
        debug_hints=(beyond,) if beyond else (),
    )


def _spread(workers: Sequence[WorkerInfo], groups: Sequence[ShareGroup], node_gpus: Mapping[str, float]) -> str | None:
    if not groups or workers[0].gpu_fraction >= 1:
        return None
    num_ranks: dict[str, int] = defaultdict(int)
    for worker in workers:
        num_ranks[worker.node_id] += 1
    for group in groups:
        first = workers[group.ranks[0]]
        # Ray's num_gpus: the node may have more GPUs.
        gpus = node_gpus.get(first.node_id, 0)
        if len(group.nodes) == 1 and group.same_device and gpus >= num_ranks[first.node_id]:
            return (
                f"Ray has {gpus:g} GPUs on node {first.node_ip} and packed {ranks_text(group.ranks)} onto one; "
                "ask for more than half a GPU each and NCCL can be used"
            )
    return None


def _fraction(workers: Sequence[WorkerInfo]) -> str | None:
    fraction = workers[0].gpu_fraction
    if not 0 < fraction < 1:
        return None
    count = workers_per_gpu(fraction)
    unused = 1 - count * fraction
    if unused < _NO_UNUSED_GPU:
        return None
    return (
        f"{count} of {fraction:g} GPU fit{'s' if count == 1 else ''} on one GPU, and {unused:.2g} of it stays unused, as Ray does not "
        f"divide a worker between GPUs; of {largest_fraction(count + 1):g} {count + 1} would fit"
    )


def _local_ranks(workers: Sequence[WorkerInfo]) -> tuple[str | None, str | None]:
    """Find the first local rank that is another rank's device index, and the first that is no device index at all."""
    another = beyond = None
    local_ranks: dict[str, int] = defaultdict(int)
    for worker in workers:
        local_rank = local_ranks[worker.node_id]
        local_ranks[worker.node_id] += 1
        if worker.device is None or local_rank == worker.device.index:
            continue
        advice = "use ray.train.torch.get_device()"
        if local_rank >= worker.num_visible_devices:
            beyond = beyond or (
                f"LOCAL_RANK {local_rank} is not a valid device index on node {worker.node_ip} "
                f"({worker.num_visible_devices} visible); {advice}"
            )
        else:
            another = another or (
                f"LOCAL_RANK {local_rank} is not the device of rank {worker.rank} on node {worker.node_ip}, which is "
                f"cuda:{worker.device.index}; {advice}"
            )
        if another and beyond:
            break
    return another, beyond


def _one_host(workers: Sequence[WorkerInfo]) -> str | None:
    """Find Ray nodes on one machine: Ray counts local ranks by node, libraries such as DeepSpeed by host name (ray#37212)."""
    nodes: dict[str, dict[str, str]] = defaultdict(dict)
    for worker in workers:
        nodes[f"{worker.hostname}\0{worker.boot_id}"][worker.node_id] = worker.hostname
    several = next((found for found in nodes.values() if len(found) > 1), None)
    if several is None:
        return None
    return (
        f"{len(several)} Ray nodes are on host {next(iter(several.values()))}: LOCAL_RANK counts the ranks of each of them, and a library "
        "that counts by host name, such as DeepSpeed, takes other numbers; use ray.train.torch.get_device()"
    )


def _multi_rank(workers: Sequence[WorkerInfo], plan: StartPlan) -> str | None:
    ranks = [rank for group in plan.share_groups for rank in group.ranks]
    if plan.backends.has_nccl or not any(workers[rank].env.get(MULTI_RANK_ENV) == "1" for rank in ranks):
        return None
    why = multi_rank_obstacle(workers, plan.share_groups) or f"{plan.backend} was asked for"
    return f"{MULTI_RANK_ENV}=1 has no effect: {why}"
