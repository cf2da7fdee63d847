"""Number of workers that fit the nodes of a cluster, and what to request if too few fit. Standard library only.

Ray assigns one device to a worker with a fraction of a GPU, so fractions of two devices do not add up: two GPUs fit two workers
of 0.6 GPU, not three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_fracbackend.decide.fractions import RESOURCE_UNIT, largest_fraction, workers_per_gpu

_MOST_PER_GPU = 1000
# Options of the commands that start Ray, by the declared resource.
_OPTIONS = {"GPU": "--num-gpus", "CPU": "--num-cpus"}


def places(node: Mapping[str, float], worker: Mapping[str, float]) -> int:
    """Return how many workers fit an empty node.

    Args:
        node: Its resources by Ray's names, such as ``{"CPU": 8, "GPU": 2}``.
        worker: Resources of each worker, with at least one amount above 0.
    """
    return min(_places(name, node.get(name, 0.0), amount) for name, amount in worker.items() if amount > 0)


def _places(name: str, there: float, amount: float) -> int:
    if name == "GPU" and amount < 1:
        return math.floor(there + RESOURCE_UNIT / 2) * workers_per_gpu(amount)
    return math.floor((there + RESOURCE_UNIT / 2) / amount)


def why_no_place(
    nodes: Sequence[Mapping[str, float]],
    worker: Mapping[str, float],
    num_workers: int,
    strategy: str,
    trainer: Mapping[str, float] | None = None,
    *,
    is_own: bool = False,
) -> str | None:
    """Explain why waiting cannot place the workers, and what to request instead.

    Args:
        nodes: Resources of each node.
        worker: Resources of each worker.
        num_workers: Number of workers.
        strategy: Ray's placement strategy, such as ``PACK``.
        trainer: Resources of the V1 engine's trainer, reserved on the node of rank 0.
        is_own: The command or its script started this Ray, so the advice is the options ``--num-gpus`` and ``--num-cpus``.

    Returns:
        One sentence or two; None if the workers fit an idle cluster of these nodes.
    """
    cluster = _Cluster(_beside(nodes, worker, trainer or {}), strategy)
    # Declaring more resources does not add a node.
    is_own = is_own and len(nodes) == 1 and (strategy != "STRICT_SPREAD" or num_workers == 1)
    have = cluster.places(worker)
    if have >= num_workers:
        return None
    if worker.get("GPU", 0) > 0 and not any(node.get("GPU", 0) > 0 for node in nodes):
        if is_own:
            declared = cluster.declaration(worker, num_workers, trainer or {}, ["GPU"])
            return (
                f"this Ray has no GPU. Declare logical GPUs with {declared}, with --on-missing-cuda cpu if the machine has no GPU, or "
                "request no GPU"
            )
        return "no node of this cluster has a GPU in Ray. Start Ray with --num-gpus on the nodes that have GPUs, or request no GPU"
    scarce = [name for name, amount in worker.items() if amount > 0 and cluster.places({name: amount}) < num_workers]
    beside = "".join(
        f" beside {amount:g} {name} for the trainer (V1)" for name, amount in (trainer or {}).items() if amount
    )
    found = f"{cluster.text(have, num_workers)}{beside}"
    if "GPU" in scarce and worker["GPU"] < 1:
        per_gpu = workers_per_gpu(worker["GPU"])
        found += f": {per_gpu} of {worker['GPU']:g} GPU fit{'s' if per_gpu == 1 else ''} on one GPU"
    alternatives = _alternatives(cluster, worker, num_workers, scarce, have)
    if is_own and scarce and set(scarce) <= set(_OPTIONS):
        declared = cluster.declaration(worker, num_workers, trainer or {}, scarce)
        if "GPU" in scarce:  # last: on a machine with a GPU, CUDA does not have the others
            alternatives.append(f"declare more logical GPUs with {declared}")
        else:
            alternatives.insert(0, f"declare more with {declared}")
    else:
        alternatives.append(f"add nodes with {' and '.join(scarce) or 'more resources'}")
    return f"{found}. {_sentence(alternatives)}"


@dataclass(frozen=True)
class _Cluster:
    """Empty nodes and a placement strategy."""

    nodes: Sequence[Mapping[str, float]]
    strategy: str

    def places(self, worker: Mapping[str, float]) -> int:
        """Return how many workers the strategy can place."""
        counts = [places(node, worker) for node in self.nodes]
        if self.strategy == "STRICT_PACK":
            return max(counts, default=0)
        return sum(map(bool, counts)) if self.strategy == "STRICT_SPREAD" else sum(counts)

    def text(self, have: int, num_workers: int) -> str:
        """Return a clause about the number of workers that fit, of those that are wanted."""
        room = _room(have, num_workers)
        if self.strategy == "STRICT_PACK" and len(self.nodes) > 1:
            return f"STRICT_PACK places all workers on one node, and the largest of {len(self.nodes)} nodes has {room}"
        if self.strategy == "STRICT_SPREAD":
            return (
                f"STRICT_SPREAD places each worker on a separate node, and {_nodes(len(self.nodes))} {self._has} {room}"
            )
        return f"{_nodes(len(self.nodes))} {self._has} {room}"

    def declaration(
        self, worker: Mapping[str, float], num_workers: int, trainer: Mapping[str, float], scarce: Sequence[str]
    ) -> str:
        """Return the options with which the workers fit one node: for scarce resources, and for those that would be scarce next."""
        options = []
        for name, option in _OPTIONS.items():
            needed = _needed(name, worker.get(name, 0.0), num_workers, trainer.get(name, 0.0))
            # The nodes' amounts are without the trainer's part.
            there = sum(node.get(name, 0.0) for node in self.nodes) + trainer.get(name, 0.0)
            if name in scarce or needed > there + RESOURCE_UNIT / 2:
                options.append(f"{option} {needed}")
        return " ".join(options)

    @property
    def _has(self) -> str:
        return "has" if len(self.nodes) == 1 else "have"


def _beside(
    nodes: Sequence[Mapping[str, float]], worker: Mapping[str, float], trainer: Mapping[str, float]
) -> Sequence[Mapping[str, float]]:
    """Subtract the trainer's resources on the node where this costs the fewest workers and one still fits."""
    if not any(trainer.values()):
        return nodes
    kept: list[tuple[int, int]] = []
    for node in nodes:
        left = places(_less(node, trainer), worker)
        kept.append((0 if left > 0 else 1, places(node, worker) - left))
    best = min(range(len(nodes)), key=kept.__getitem__, default=None)
    return [_less(node, trainer) if index == best else node for index, node in enumerate(nodes)]


def _less(node: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, amount - taken.get(name, 0.0)) for name, amount in node.items()}


def _needed(name: str, amount: float, num_workers: int, trainer: float) -> int:
    """Return how much of a resource one node needs for all workers and the trainer."""
    if name == "GPU" and 0 < amount < 1:
        return math.ceil(num_workers / workers_per_gpu(amount))
    return math.ceil(num_workers * amount + trainer - RESOURCE_UNIT / 2)


def _alternatives(
    cluster: _Cluster, worker: Mapping[str, float], num_workers: int, scarce: Sequence[str], have: int
) -> list[str]:
    """Return what to request instead, the closest alternative first."""
    others = []
    if scarce == ["GPU"] and (fraction := _fitting(cluster, worker, num_workers)):
        others.append(f"ask for {fraction:g} GPU per worker")
    if cluster.strategy.startswith("STRICT_") and _Cluster(cluster.nodes, "PACK").places(worker) >= num_workers:
        others.append(f"use {'SPREAD or PACK' if cluster.strategy == 'STRICT_SPREAD' else 'PACK'}")
    if have:
        others.append(f"ask for {have} worker{'s' if have > 1 else ''}")
    return others


def _sentence(alternatives: Sequence[str]) -> str:
    *first, last = alternatives
    text = f"{', '.join(first)}, or {last}" if first else last
    return text[0].upper() + text[1:]


def _fitting(cluster: _Cluster, worker: Mapping[str, float], num_workers: int) -> float | None:
    """Return the largest 1/k of a GPU with which the workers fit; None if there is none."""
    for per_gpu in range(1, _MOST_PER_GPU + 1):
        fraction = largest_fraction(per_gpu)
        if cluster.places({**worker, "GPU": fraction}) >= num_workers:
            return fraction
    return None


def _nodes(count: int) -> str:
    return {0: "no node", 1: "one node"}.get(count, f"{count} nodes")


def _room(have: int, num_workers: int) -> str:
    if have == 0:
        return f"no room for {'it' if num_workers == 1 else 'them'}"
    return f"room for {have} of them"
