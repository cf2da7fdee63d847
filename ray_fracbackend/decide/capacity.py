"""Places for workers on the nodes of a cluster, and what to ask for where there are too few. Standard library only.

Ray gives a worker with a fraction of a GPU one device, so fractions of two devices do not add up: two GPUs have two places for
workers of 0.6, not three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Ray counts resources in ten-thousandths.
_UNIT = 1e-4
_MOST_PER_GPU = 1000


def places(node: Mapping[str, float], worker: Mapping[str, float]) -> int:
    """Return how many workers fit an empty node.

    Args:
        node: Its resources by Ray's names, such as ``{"CPU": 8, "GPU": 2}``.
        worker: What each worker reserves, with at least one amount above 0.
    """
    return min(_places(name, node.get(name, 0.0), amount) for name, amount in worker.items() if amount > 0)


def _places(name: str, there: float, amount: float) -> int:
    if name == "GPU" and amount < 1:
        return math.floor(there + _UNIT / 2) * math.floor((1 + _UNIT / 2) / amount)
    return math.floor((there + _UNIT / 2) / amount)


def why_no_place(
    nodes: Sequence[Mapping[str, float]], worker: Mapping[str, float], num_workers: int, strategy: str
) -> str | None:
    """Explain why workers cannot be placed however long they wait, and what to ask for instead.

    Args:
        nodes: Resources of each node.
        worker: What each worker reserves.
        num_workers: How many.
        strategy: Ray's placement strategy, such as ``PACK``.

    Returns:
        One sentence or two; None where an idle cluster of these nodes has the places.
    """
    on_node = [places(node, worker) for node in nodes]
    together, apart = strategy == "STRICT_PACK", strategy == "STRICT_SPREAD"
    have = max(on_node, default=0) if together else sum(count > 0 for count in on_node) if apart else sum(on_node)
    if have >= num_workers:
        return None
    if worker.get("GPU", 0) > 0 and not any(node.get("GPU", 0) > 0 for node in nodes):
        return "no node of this cluster has a GPU in Ray. Start Ray with --num-gpus on the nodes that have some, or ask for none"
    if apart:
        return (
            f"STRICT_SPREAD places each worker on a node of its own, and {_nodes(have)} can take one. Use SPREAD or PACK, ask for "
            f"{max(have, 1)}, or add nodes"
        )
    where = f"each of {_nodes(len(nodes))}" if together and len(nodes) > 1 else _nodes(len(nodes))
    found = f"{where} {'has' if together or len(nodes) < 2 else 'have'} {_count(have)} for such workers"
    return f"{found}{_fraction_text(worker.get('GPU', 0.0))}. {_advice(nodes, worker, num_workers, strategy, have)}"


def _with_only(nodes: Sequence[Mapping[str, float]], name: str, amount: float, strategy: str) -> int:
    counts = [_places(name, node.get(name, 0.0), amount) for node in nodes]
    return max(counts, default=0) if strategy == "STRICT_PACK" else sum(counts)


def _fraction_text(fraction: float) -> str:
    if not 0 < fraction < 1:
        return ""
    per_gpu = math.floor((1 + _UNIT / 2) / fraction)
    return f": {per_gpu} of {fraction:g} GPU fit{'s' if per_gpu == 1 else ''} on one GPU"


def _advice(
    nodes: Sequence[Mapping[str, float]], worker: Mapping[str, float], num_workers: int, strategy: str, have: int
) -> str:
    scarce = [
        name
        for name, amount in worker.items()
        if amount > 0 and _with_only(nodes, name, amount, strategy) < num_workers
    ]
    ask = []
    if scarce == ["GPU"] and (fraction := _fitting(nodes, worker, num_workers, strategy)):
        ask.append(f"{fraction:g} GPU per worker")
    if have:
        ask.append(f"{have} worker{'s' if have > 1 else ''}")
    if strategy == "STRICT_PACK" and sum(places(node, worker) for node in nodes) >= num_workers:
        ask.append("PACK")
    add = f"add nodes with {' and '.join(scarce) or 'more resources'}"
    return f"Ask for {' or '.join(ask)}, or {add}" if ask else f"A{add[1:]}"


def _fitting(
    nodes: Sequence[Mapping[str, float]], worker: Mapping[str, float], num_workers: int, strategy: str
) -> float | None:
    """Return the largest 1/k of a GPU with which the workers fit, in Ray's precision; None where none does."""
    for per_gpu in range(1, _MOST_PER_GPU + 1):
        fraction = math.floor(1 / per_gpu / _UNIT) * _UNIT
        changed = {**worker, "GPU": round(fraction, 4)}
        on_node = [places(node, changed) for node in nodes]
        if (max(on_node, default=0) if strategy == "STRICT_PACK" else sum(on_node)) >= num_workers:
            return changed["GPU"]
    return None


def _nodes(count: int) -> str:
    return {0: "no node", 1: "one node"}.get(count, f"{count} nodes")


def _count(count: int) -> str:
    return {0: "no place", 1: "one place"}.get(count, f"{count} places")
