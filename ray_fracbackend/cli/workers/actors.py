"""Workers for the commands ``plan`` and ``test``, placed as Ray Train places those of a ScalingConfig. Driver and workers.

Ray Train itself is not used: it needs storage that all nodes share, but a probe and the start of a group do not.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import ScalingConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_fracbackend import _ray
from ray_fracbackend.cli.progress import progress, root_cause, wait
from ray_fracbackend.cli.workers.shortage import bundles_of, cluster_too_small, request_text, resources_in_use
from ray_fracbackend.config import FracTorchConfig
from ray_fracbackend.decide.left_to_ray import left_to_ray
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.errors import FracBackendError, InsufficientResourcesError, StartTimeoutError

_POLL_S = 0.5


@dataclass(frozen=True)
class _Placement:
    """Node, process and GPUs of one worker; the first three have the names of Ray Train's metadata."""

    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...]


class _ProbeWorker:
    """Actor that is scheduled like a Ray Train worker."""

    def place(self) -> _Placement:
        node_id, node_ip = _ray.node_ids()
        return _Placement(node_id, node_ip, os.getpid(), tuple(map(str, _ray.accelerator_ids().get("GPU", []))))

    def see(self, visible: str) -> None:
        """Make the devices of all workers on this node visible, as Ray Train does."""
        if visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible

    def execute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@dataclass(frozen=True)
class _Worker:
    actor: Any
    metadata: _Placement


@dataclass(frozen=True)
class ProbeGroup:
    """Workers by rank, with the methods of Ray Train's worker groups that a start uses.

    Attributes:
        workers: Actor and placement of each rank.
        resources: Resources that each worker has reserved.
    """

    workers: Sequence[_Worker]
    resources: Mapping[str, float]

    def execute_single_async(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of an importable module on one rank, and return a reference to its result."""
        return self.workers[rank].actor.execute.remote(function, *arguments)

    def execute_async(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on all ranks, and return references to the results by rank."""
        return [self.execute_single_async(rank, function, *arguments) for rank in range(len(self.workers))]

    def get_resources_per_worker(self) -> Mapping[str, float]:
        """Return the resources that each worker has reserved."""
        return self.resources


def check_plannable(scaling_config: ScalingConfig, torch_config: FracTorchConfig) -> None:
    """Check that there are workers to place and that this package starts them; needs no Ray.

    Raises:
        ValueError: One of these is not the case.
    """
    num_workers = scaling_config.num_workers
    if not isinstance(num_workers, int) or num_workers < 1:
        raise ValueError(f"ScalingConfig(num_workers={num_workers!r}): a plan needs a fixed number of at least 1.")
    bundles = bundles_of(scaling_config)
    if not bundles:
        raise ValueError("a plan needs workers with resources: request CPUs or GPUs for them.")
    left = left_to_ray(torch_config.backend, bundles[-1])
    if left is not None:
        raise ValueError(f"{left}: there is nothing to plan.")


@contextmanager
def probe_workers(
    scaling_config: ScalingConfig, settings: Settings, timeout_s: float, fixed: bool
) -> Iterator[ProbeGroup]:
    """Place workers with the bundles and strategy of a training run, and end them when the block ends.

    Args:
        scaling_config: As for `check_plannable`.
        settings: ``start_timeout_s`` limits the start of the workers' processes.
        timeout_s: How long to wait for the resources, in seconds.
        fixed: No autoscaler adds nodes, so workers that cannot fit are an error at once.

    Yields:
        The workers, by rank.

    Raises:
        InsufficientResourcesError: The cluster has not placed the workers in time.
        StartTimeoutError: The workers did not start in time.
        FracBackendError: A worker did not start.
    """
    bundles = bundles_of(scaling_config)
    strategy = scaling_config.as_placement_group_factory().strategy
    wanted = request_text(bundles, strategy)
    if fixed and (reason := cluster_too_small(bundles, strategy, is_own=True)):
        raise InsufficientResourcesError(f"Ray cannot place {wanted}: {reason}.")
    group = placement_group(bundles, strategy=strategy)
    actors: list[Any] = []
    try:
        _wait_for_resources(group, bundles, strategy, wanted, timeout_s)
        actors.extend(_actor(scaling_config, group, index) for index in range(scaling_config.num_workers))
        yield ProbeGroup(_by_rank(actors, settings.start_timeout_s), bundles[-1])
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _wait_for_resources(
    group: PlacementGroup, bundles: Sequence[dict[str, float]], strategy: str, wanted: str, timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    with progress(1, "waiting for the resources") as show:
        while (left_s := end - time.monotonic()) > 0:
            if group.wait(min(_POLL_S, left_s)):
                return
            show(0)
    reason = cluster_too_small(bundles, strategy)
    raise InsufficientResourcesError(
        f"Ray did not place {wanted} within {timeout_s:g} s: {reason or resources_in_use(bundles)}."
    )


def _actor(scaling_config: ScalingConfig, group: PlacementGroup, index: int) -> Any:
    return (
        ray.remote(_ProbeWorker)
        .options(
            num_cpus=scaling_config.num_cpus_per_worker,
            num_gpus=scaling_config.num_gpus_per_worker,
            resources=scaling_config.additional_resources_per_worker,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        .remote()
    )


def _by_rank(actors: Sequence[Any], timeout_s: float) -> list[_Worker]:
    refs = [actor.place.remote() for actor in actors]
    if pending := wait(refs, timeout_s, "starting the probe workers"):
        raise StartTimeoutError(
            f"{len(pending)} of {len(refs)} probe workers did not start within start_timeout_s={timeout_s:g}. Check "
            "the nodes' load and logs, or raise start_timeout_s."
        )
    try:
        places: list[_Placement] = ray.get(refs)
    except RayError as error:
        cause = root_cause(error)
        raise FracBackendError(f"a probe worker did not start ({type(cause).__name__}: {cause}).") from error
    visible: dict[str, set[str]] = defaultdict(set)
    for place in places:
        visible[place.node_id].update(place.gpu_ids)
    for actor, place in zip(actors, places, strict=True):
        actor.see.remote(",".join(sorted(visible[place.node_id])))  # before any later call of this actor
    order = rank_order([place.node_id for place in places], [place.gpu_ids for place in places])
    return [_Worker(actors[index], places[index]) for index in order]


def rank_order(node_ids: Sequence[str], gpu_ids: Sequence[Sequence[str]]) -> list[int]:
    """Order workers as Ray Train ranks them: by node, and on a node by lowest GPU id.

    Args:
        node_ids: Node of each worker; nodes keep the order in which they first appear.
        gpu_ids: Ray's GPU ids of each worker.

    Returns:
        Indices of the workers, by rank.
    """
    first = {node_id: place for place, node_id in reversed(list(enumerate(node_ids)))}

    def key(index: int) -> tuple[int, tuple[int, str]]:
        lowest = min(((int(i), "") if i.isdecimal() else (0, i) for i in gpu_ids[index]), default=(0, ""))
        return first[node_ids[index]], lowest

    return sorted(range(len(node_ids)), key=key)
