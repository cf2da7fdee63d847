"""Explain why Ray does not place workers: the cluster is too small, or other jobs hold its resources. Runs on the driver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from ray_fracbackend.cli.workers.capacity import why_no_place


def bundles_of(scaling_config: Any) -> list[dict[str, float]]:
    """Return the bundles that Ray Train reserves for a ScalingConfig: the first one contains V1's trainer and rank 0."""
    return [bundle for bundle in scaling_config.as_placement_group_factory().bundles if bundle]


def request_text(bundles: Sequence[Mapping[str, float]], strategy: str) -> str:
    """Return the request as text: ``2 workers of 1 CPU and 0.5 GPU each (PACK)``."""
    each = " and ".join(f"{amount:g} {name}" for name, amount in sorted(bundles[-1].items()) if amount)
    count = "one worker of" if len(bundles) == 1 else f"{len(bundles)} workers of"
    return f"{count} {each}{' each' if len(bundles) > 1 else ''} ({strategy})"


def cluster_too_small(bundles: Sequence[Mapping[str, float]], strategy: str, *, is_own: bool = False) -> str | None:
    """Explain why these bundles do not fit the nodes of the cluster, even an idle one, and what to request.

    Args:
        bundles: As from `bundles_of`.
        strategy: Ray's placement strategy.
        is_own: As for `why_no_place`.

    Returns:
        None if the nodes have enough.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # V1 puts its trainer into the bundle of rank 0.
    trainer = {name: amount - bundles[-1].get(name, 0.0) for name, amount in bundles[0].items()}
    return why_no_place(nodes, bundles[-1], len(bundles), strategy, trainer, is_own=is_own)


def resources_in_use(bundles: Sequence[Mapping[str, float]]) -> str:
    """Explain that other jobs hold the resources of these bundles, with the needed and the free amounts."""
    needed: dict[str, float] = defaultdict(float)
    for bundle in bundles:
        for name, amount in bundle.items():
            needed[name] += amount
    free = ray.available_resources()
    listed = ", ".join(
        f"{amount:g} {name} needed and {free.get(name, 0):g} free" for name, amount in sorted(needed.items()) if amount
    )
    return f"other jobs hold the resources ({listed}). Wait for them to end, request fewer resources, or add nodes"
