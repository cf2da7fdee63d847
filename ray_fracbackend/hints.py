"""What would be better than what was asked for. Pure functions over WorkerFacts; a hint never changes a decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ray_fracbackend.facts import WorkerFacts, ranks_text
from ray_fracbackend.sharing import ShareGroup


def hints_for(workers: Sequence[WorkerFacts], groups: Sequence[ShareGroup], backend: str) -> tuple[str, ...]:
    """Advice on placement, fractions and device indices, at most one line a subject.

    Args:
        workers: Facts of every rank, in rank order.
        groups: The ranks that share a device.
        backend: The backend that was chosen.
    """
    found = [_spread(workers, groups), _fraction(workers), _local_rank(workers), _multi_rank(workers, groups, backend)]
    return tuple(hint for hint in found if hint)


def _spread(workers: Sequence[WorkerFacts], groups: Sequence[ShareGroup]) -> str | None:
    if not groups:
        return None
    num_ranks: dict[str, int] = defaultdict(int)
    num_devices: dict[str, int] = {}
    for worker in workers:
        num_ranks[worker.node_ip] += 1
        num_devices[worker.node_ip] = worker.num_node_devices or 0
    for group in groups:
        node = group.nodes[0]
        if len(group.nodes) == 1 and group.same_device and num_devices[node] >= num_ranks[node]:
            return (
                f"node {node} has {num_devices[node]} GPUs and Ray packed {ranks_text(group.ranks)} onto one; "
                "ask for more than half a GPU each and NCCL can be used"
            )
    return None


def _fraction(workers: Sequence[WorkerFacts]) -> str | None:
    fraction = workers[0].gpu_fraction
    if not 0 < fraction < 1 or abs(1 / fraction - round(1 / fraction)) < 1e-3:
        return None
    count = int(1 / fraction)
    return f"{fraction:g} GPU a worker is not 1/k of a device: Ray may leave workers waiting; use 1/{count} ({1 / count:.3g})"


def _local_rank(workers: Sequence[WorkerFacts]) -> str | None:
    local_ranks: dict[str, int] = defaultdict(int)
    for worker in workers:
        local_rank = local_ranks[worker.node_id]
        local_ranks[worker.node_id] += 1
        if worker.device is None or local_rank == worker.device.index:
            continue
        if local_rank >= worker.num_visible_devices:
            wrong = f"is not a valid device index on node {worker.node_ip} ({worker.num_visible_devices} visible)"
        else:
            wrong = (
                f"is not the device of rank {worker.rank} on node {worker.node_ip}, which is cuda:{worker.device.index}"
            )
        return f"LOCAL_RANK {local_rank} {wrong}; use ray.train.torch.get_device()"
    return None


def _multi_rank(workers: Sequence[WorkerFacts], groups: Sequence[ShareGroup], backend: str) -> str | None:
    if groups and "nccl" not in backend and workers[0].env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return f"NCCL_MULTI_RANK_GPU_ENABLE=1 has no effect on {backend}; use on_shared_device='nccl' to train with it"
    return None
