"""Check that Ray can place workers, and explain why it does not: the cluster is too small, or other jobs hold its resources. On the driver."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from ray_fracbackend.decide.device_sharing import RESOURCE_UNIT, workers_per_gpu
from ray_fracbackend.errors import InsufficientResourcesError
from ray_fracbackend.timeouts import Deadline

_POLL_S = 0.5


def check_placement(scaling_config: Any, timeout_s: float, *, is_own: bool) -> None:
    """Let Ray place the bundles of a ScalingConfig once, and remove them.

    Args:
        scaling_config: Of the workers.
        timeout_s: How long to wait for the resources, in seconds.
        is_own: This Ray was started for the command: what cannot fit is an error at once, because no node will join.

    Raises:
        InsufficientResourcesError: Ray has not placed them in time.
    """
    bundles, strategy = bundles_of(scaling_config), scaling_config.placement_strategy
    wanted, deadline = request_text(bundles, strategy), Deadline(timeout_s)
    if is_own and (reason := cluster_too_small(bundles, strategy, is_own=True)):
        raise InsufficientResourcesError(f"Ray cannot place {wanted}: {reason}.")
    group = placement_group(bundles, strategy=strategy)
    try:
        while not group.wait(min(_POLL_S, deadline.left_s)):
            if deadline.left_s < _POLL_S / 10:
                reason = cluster_too_small(bundles, strategy) or resources_in_use(bundles)
                raise InsufficientResourcesError(f"Ray did not place {wanted} within {timeout_s:g} s: {reason}.")
    finally:
        remove_placement_group(group)


def bundles_of(scaling_config: Any) -> list[dict[str, float]]:
    """Return the bundles that Ray Train reserves for a ScalingConfig: the first one contains V1's trainer and rank 0."""
    return [bundle for bundle in scaling_config.as_placement_group_factory().bundles if bundle]


def request_text(bundles: Sequence[Mapping[str, float]], strategy: str) -> str:
    """Return the request as text: ``2 workers of 1 CPU and 0.5 GPU each (PACK)``."""
    count = "one worker of" if len(bundles) == 1 else f"{len(bundles)} workers of"
    return f"{count} {_text(bundles[-1])}{' each' if len(bundles) > 1 else ''} ({strategy})"


def cluster_too_small(bundles: Sequence[Mapping[str, float]], strategy: str, *, is_own: bool = False) -> str | None:
    """Explain why these bundles do not fit the nodes of the cluster, even an idle one; None if they do.

    Args:
        bundles: As from `bundles_of`. V1's trainer is left out.
        strategy: Ray's placement strategy.
        is_own: This process started this Ray, so it can declare more.
    """
    nodes, worker = [node["Resources"] for node in ray.nodes() if node["Alive"]], bundles[-1]
    places = [_places(node, worker) for node in nodes]
    strict = {"STRICT_PACK": max(places, default=0), "STRICT_SPREAD": sum(map(bool, places))}
    room = strict.get(strategy, sum(places))
    if room >= len(bundles):
        return None
    sizes = Counter(_text({name: node.get(name, 0.0) for name in worker}) for node in nodes)
    have = ", ".join(f"{count} x ({size})" for size, count in sizes.items())
    gpus = worker.get("GPU", 0.0)
    each = f", {workers_per_gpu(gpus)} on each GPU" if 0 < gpus < 1 else ""
    more = "declare more with --num-gpus and --num-cpus" if is_own else "add nodes"
    return f"the cluster has {have}: room for {room} of them{each}. Request fewer or smaller workers, or {more}"


def resources_in_use(bundles: Sequence[Mapping[str, float]]) -> str:
    """Explain that too little is free for these bundles, with the needed and the free amounts."""
    free, needed = ray.available_resources(), defaultdict[str, float](float)
    for bundle in bundles:
        for name, amount in bundle.items():
            needed[name] += amount
    listed = ", ".join(f"{amount:g} {name} needed and {free.get(name, 0):g} free" for name, amount in needed.items())
    return f"too little is free ({listed}). Wait for other jobs to end, request fewer resources, or add nodes"


def _places(node: Mapping[str, float], worker: Mapping[str, float]) -> int:
    """Return how many workers fit an idle node; each fraction of a GPU is of one device."""
    counts = []
    for name, amount in worker.items():
        there = node.get(name, 0.0) + RESOURCE_UNIT / 2
        if name == "GPU" and 0 < amount < 1:
            counts.append(math.floor(there) * workers_per_gpu(amount))
        elif amount:
            counts.append(math.floor(there / amount))
    return min(counts)


def _text(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))
