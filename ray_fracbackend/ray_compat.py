"""Every touch of a private Ray name; no other module imports one.

Checked against Ray 2.40 (first supported; V1 engine only), 2.48 and 2.60 (V1 and V2 engines):

==========================================  =========================================================
``ray.train.torch.config._TorchBackend``    2.40 to 2.60; runs backends that are not ours, and shutdown
``..._set_torch_distributed_env_vars``      2.40 to 2.60; run before ``init_process_group`` by V2 only
``ray.train._internal.worker_group``        ``WorkerGroup`` (V1), 2.40 to 2.60
``ray.air._internal.torch_utils``           ``get_devices``, 2.40 to 2.60
``ray.air._internal.device_manager``        ``_torch_device_manager``, 2.40 to 2.60
worker groups                               V1 ``.workers``, V2 ``.get_workers()``, ``.abort()``; ``Worker.metadata``
==========================================  =========================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.air._internal import device_manager as _device_manager
from ray.air._internal.device_manager import CPUTorchDeviceManager
from ray.air._internal.torch_utils import get_devices as _get_devices
from ray.train._internal.worker_group import WorkerGroup as V1WorkerGroup
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

if TYPE_CHECKING:
    import torch

TorchBackend = _TorchBackend

# Ray configures the level and the handlers of "ray.train" in its controller and workers, and of nothing else.
logger = logging.getLogger("ray.train.fracbackend")


@dataclass(frozen=True)
class WorkerAddress:
    """Where Ray put a worker, known before the worker has answered anything.

    Attributes:
        rank: Index in its worker group.
        node_ip: Ray's address of its node.
        pid: Its process id.
    """

    rank: int
    node_ip: str
    pid: int

    @property
    def text(self) -> str:
        """``rank 3 (node 10.0.0.3, pid 4711)``."""
        return f"rank {self.rank} (node {self.node_ip}, pid {self.pid})"


def _workers(worker_group: Any) -> list[Any]:
    return list(worker_group.workers if isinstance(worker_group, V1WorkerGroup) else worker_group.get_workers())


def worker_addresses(worker_group: Any) -> list[WorkerAddress]:
    """Addresses of all workers of a V1 or V2 worker group or of a V2 replica group, by rank."""
    workers = enumerate(_workers(worker_group))
    return [WorkerAddress(rank, worker.metadata.node_ip, worker.metadata.pid) for rank, worker in workers]


def resources_per_worker(worker_group: Any) -> Mapping[str, float]:
    """What every worker of the group has reserved, as far as the driver knows it without asking a worker."""
    if hasattr(worker_group, "get_resources_per_worker"):
        resources: Mapping[str, float] = worker_group.get_resources_per_worker()
        return resources
    if isinstance(worker_group, V1WorkerGroup):  # before Ray 2.49
        return {"GPU": worker_group.num_gpus_per_worker}
    return dict(_workers(worker_group)[0].resources)


def release_workers(worker_group: Any) -> None:
    """Ends the workers of a V2 group whose start failed; V1 does it itself, and a replica group's owner does.

    An exception in ``on_start`` makes V2 forget the group that it has just made, with workers and placement group still
    there (WorkerGroup.create and _start, 2.48 to 2.60). ``abort`` ends them without a graceful shutdown of the backend,
    which would wait for a rank that hangs.
    """
    abort = getattr(worker_group, "abort", None)
    if abort is None:
        return
    try:
        abort()
    except Exception as error:  # the start's own error is the one to tell
        logger.warning("the workers of the failed start may still be there: %s", error)


def sets_env_before_init(worker_group: Any) -> bool:
    """True where the train context exists before ``on_start`` (V2), so that RANK and its kin are set there."""
    return not isinstance(worker_group, V1WorkerGroup)


def set_torch_distributed_env() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, ... as stock Ray Train does. On the worker."""
    _set_torch_distributed_env_vars()


def node_ids() -> tuple[str, str]:
    """Ray's id and address of this worker's node."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def assigned_resources() -> Mapping[str, float]:
    """What Ray reserved for this worker, such as ``{"CPU": 1.0, "GPU": 0.5}``."""
    resources: Mapping[str, float] = ray.get_runtime_context().get_assigned_resources()
    return resources


def accelerator_ids() -> Mapping[str, list[str]]:
    """Ray's ids of this worker's accelerators by resource name."""
    ids: Mapping[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    return ids


def worker_devices() -> list[torch.device]:
    """The devices that ``ray.train.torch.get_devices()`` will give this worker's train function."""
    return list(_get_devices())


def train_on_cpu() -> None:
    """Makes ``ray.train.torch.get_device()`` and ``prepare_model`` of this worker use the CPU, whatever Ray reserved."""
    with _device_manager._torch_device_manager_lock:
        _device_manager._torch_device_manager = CPUTorchDeviceManager()
