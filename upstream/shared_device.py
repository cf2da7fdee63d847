"""Piece 2: say who shares a device before NCCL refuses it (ray-project/ray#48012).

Goes into ``ray/train/torch/config.py``. With it move ``worker_info.py``, ``device_sharing.py``,
``errors.py`` and the device half of ``probe.py``.
"""

import logging
from typing import Any, Callable, Sequence

from ray_fracbackend.decide.device_sharing import share_text, shared_devices
from ray_fracbackend.decide.nccl import multi_rank_obstacle, nccl_conflicts
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.errors import SharedDeviceError
from ray_fracbackend.worker.probe import probe_devices

from upstream.bounded_start import get_all
from upstream.gloo_default import defaults_to_nccl, with_backend

from ray.train.torch import TorchConfig

logger = logging.getLogger("ray.train.torch.config")


def on_start(original: Callable[..., None]) -> Callable[..., None]:
    """``_TorchBackend.on_start`` that looks at the devices where NCCL is to be used."""

    def on_start(self: Any, worker_group: Any, backend_config: TorchConfig) -> None:
        default = defaults_to_nccl(worker_group, backend_config)
        if default or "nccl" in (backend_config.backend or ""):
            backend_config = without_conflict(probe(worker_group), backend_config)
        original(self, worker_group, backend_config)

    return on_start


def probe(worker_group: Any) -> Sequence[WorkerInfo]:
    """What every worker sits on, by rank. Creates no CUDA context."""
    refs = [
        worker_group.execute_single_async(rank, probe_devices, rank)
        for rank in range(len(worker_group))
    ]
    return get_all(refs)


def without_conflict(
    workers: Sequence[WorkerInfo], backend_config: TorchConfig
) -> TorchConfig:
    """The config to start with, now that the devices are known. Pure.

    Args:
        workers: Facts of every rank, in rank order.
        backend_config: The config; it means NCCL, by default or by name.

    Returns:
        The same config, or a copy with gloo where the user left the backend open and
        NCCL would refuse the devices.

    Raises:
        SharedDeviceError: NCCL was asked for by name, and would refuse the devices.
    """
    if any(not worker.nccl_available for worker in workers):
        return backend_config
    groups = (*shared_devices(workers), *nccl_conflicts(workers))
    # NCCL 2.30 takes several ranks on a device from users who set its variable for it.
    if not groups or multi_rank_obstacle(workers, groups) is None:
        return backend_config
    found = share_text(groups)
    if backend_config.backend is None:
        logger.warning(
            "%s: using gloo, because NCCL refuses devices that ranks share. Ask for "
            "more than half a GPU per worker to have one worker on each.",
            found,
        )
        return with_backend(backend_config, "gloo")
    raise SharedDeviceError(
        f"{found}, which NCCL refuses, and TorchConfig(backend="
        f"{backend_config.backend!r}) asks for NCCL. Ask for more than half a GPU per "
        "worker, use fewer workers, or use TorchConfig(backend='gloo').",
        ranks={rank for group in groups for rank in group.ranks},
    )
