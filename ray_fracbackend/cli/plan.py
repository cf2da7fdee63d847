"""Command ``plan``: plan a start for a ScalingConfig on a real cluster, without training. Driver and probe workers."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import ScalingConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_fracbackend import _ray
from ray_fracbackend.backend import gpus_by_node
from ray_fracbackend.cli.cluster import progress, root_cause, wait
from ray_fracbackend.collect import gather
from ray_fracbackend.config import FracTorchConfig
from ray_fracbackend.decide import decide_start
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import asks_for_ipc, left_to_ray
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.errors import FracBackendError, InsufficientResourcesError, StartTimeoutError
from ray_fracbackend.report import StartReport
from ray_fracbackend.timeouts import Deadline
from ray_fracbackend.worker.probe import probe_worker

_POLL_S = 0.5


@dataclass(frozen=True)
class _Placement:
    """Node, process and GPUs of one probe worker."""

    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...]


class _ProbeWorker:
    """Actor that is scheduled like a Ray Train worker."""

    def place(self) -> _Placement:
        node_id, node_ip = _ray.node_ids()
        return _Placement(node_id, node_ip, os.getpid(), tuple(map(str, _ray.accelerator_ids().get("GPU", []))))

    def probe(self, rank: int, visible: str, *arguments: Any) -> WorkerInfo:
        if visible:
            # As Ray Train does for its workers: each sees the devices of all workers on its node.
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        return probe_worker(rank, *arguments)


def plan_workers(
    scaling_config: ScalingConfig, torch_config: FracTorchConfig | None = None, *, timeout_s: float = 30.0
) -> StartReport:
    """Place probe workers with the bundles and strategy of a training run, and plan their start.

    Needs a connection to Ray. Trains nothing, starts no process group, and leaves no actor and no placement group behind.

    Args:
        scaling_config: As for a TorchTrainer, with a fixed number of workers of at least 1.
        torch_config: The settings, by default those of ``FracTorchConfig()``.
        timeout_s: How long to wait for the resources, in seconds. Once they are there, ``start_timeout_s`` of the settings is
            the bound.

    Returns:
        The report of that start, without measurements: share map, decision, reasons. A table in notebooks.

    Raises:
        InsufficientResourcesError: The cluster has not placed the workers in time.
        FracBackendError: The start would fail; the message says why and what to do.
        ValueError: There is nothing to plan: no fixed number of workers, or a start that is left to Ray.
    """
    num_workers = scaling_config.num_workers
    if not isinstance(num_workers, int) or num_workers < 1:
        raise ValueError(f"ScalingConfig(num_workers={num_workers!r}): a plan needs a fixed number of at least 1.")
    settings = (torch_config or FracTorchConfig()).checked_copy()
    factory = scaling_config.as_placement_group_factory()
    bundles = [bundle for bundle in factory.bundles if bundle]
    if not bundles:
        raise ValueError("a plan needs workers with resources: give them CPUs or GPUs.")
    reason = left_to_ray(settings.backend, bundles[-1])
    if reason is not None:
        raise ValueError(f"{reason}: there is nothing to plan.")
    group = placement_group(bundles, strategy=factory.strategy)
    actors: list[Any] = []
    try:
        _wait_for_resources(group, bundles, factory.strategy, timeout_s)
        actors.extend(_probe_worker(scaling_config, group, index) for index in range(num_workers))
        workers = _probe(actors, settings)
        plan, _ = decide_start(workers, settings, gpus_by_node())
        return StartReport(plan=plan, workers=workers)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _wait_for_resources(
    group: PlacementGroup, bundles: Sequence[dict[str, float]], strategy: str, timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    with progress(1, "waiting for the resources") as show:
        while (left_s := end - time.monotonic()) > 0:
            if group.wait(min(_POLL_S, left_s)):
                return
            show(0)
    needed: dict[str, float] = defaultdict(float)
    for bundle in bundles:
        for name, amount in bundle.items():
            needed[name] += amount
    total, free = ray.cluster_resources(), ray.available_resources()
    listed = ", ".join(
        f"{name}: {amount:g} needed, {total.get(name, 0):g} in the cluster, {free.get(name, 0):g} free"
        for name, amount in needed.items()
        if amount
    )
    raise InsufficientResourcesError(
        f"Ray did not place {len(bundles)} workers ({strategy}) within {timeout_s:g} s. {listed}. Ask for less, wait until others "
        "are done, or start Ray with more."
    )


def _probe_worker(scaling_config: ScalingConfig, group: PlacementGroup, index: int) -> Any:
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


def _probe(actors: Sequence[Any], settings: Settings) -> tuple[WorkerInfo, ...]:
    deadline = Deadline(settings.start_timeout_s)
    refs = [actor.place.remote() for actor in actors]
    if pending := wait(refs, deadline.left_s, "starting the probe workers"):
        raise StartTimeoutError(
            f"{len(pending)} of {len(refs)} probe workers did not start within start_timeout_s={settings.start_timeout_s:g}. Look at "
            "the nodes' load and logs, or raise it."
        )
    try:
        places: list[_Placement] = ray.get(refs)
    except RayError as error:
        cause = root_cause(error)
        raise FracBackendError(f"a probe worker did not start ({type(cause).__name__}: {cause}).") from error
    order = rank_order([place.node_id for place in places], [place.gpu_ids for place in places])
    visible: dict[str, set[str]] = defaultdict(set)
    for place in places:
        visible[place.node_id].update(place.gpu_ids)
    one_node = len({place.node_id for place in places}) == 1
    arguments = (settings.master_addr, settings.master_port, one_node, asks_for_ipc(settings))
    addresses, refs = [], []
    for rank, index in enumerate(order):
        place = places[index]
        addresses.append(_ray.WorkerAddress(rank, place.node_ip, place.pid, place.node_id))
        devices = ",".join(sorted(visible[place.node_id]))
        refs.append(actors[index].probe.remote(rank, devices, *arguments))
    return tuple(gather(refs, addresses, deadline, "probing the workers"))


def rank_order(node_ids: Sequence[str], gpu_ids: Sequence[Sequence[str]]) -> list[int]:
    """Order workers as Ray Train ranks them: by node, in it by lowest GPU id.

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
