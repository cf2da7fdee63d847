"""Piece 1: gloo where a worker's torch has no NCCL (ray-project/ray#49778).

Goes into ``ray/train/torch/config.py``. Moves nothing: torch answers the question.
"""

import copy
import logging
from typing import Any, Callable

import torch.distributed as dist
from ray_fracbackend import _ray
from ray_fracbackend.decide.worker_info import ranks_text

from ray.train.torch import TorchConfig

logger = logging.getLogger("ray.train.torch.config")


def leave_backend_unset(original: Callable[..., None]) -> Callable[..., None]:
    """``TorchTrainer.__init__`` without its default of the backend.

    The driver chooses by ``use_gpu`` alone. It may have another torch than the workers,
    and its choice looks like the user's own afterwards.
    """

    def __init__(self: Any, train_loop_per_worker: Any, **kwargs: Any) -> None:
        torch_config = kwargs.pop("torch_config", None) or TorchConfig()
        asked = torch_config.backend
        original(self, train_loop_per_worker, torch_config=torch_config, **kwargs)
        torch_config.backend = asked

    return __init__


def on_start(original: Callable[..., None]) -> Callable[..., None]:
    """``_TorchBackend.on_start`` with gloo as the default where NCCL is missing."""

    def on_start(self: Any, worker_group: Any, backend_config: TorchConfig) -> None:
        if defaults_to_nccl(worker_group, backend_config):
            missing = _ranks_without_nccl(worker_group)
            if missing:
                logger.warning(
                    "torch of %s has no NCCL: using gloo. Set TorchConfig(backend=...) "
                    "to choose yourself.",
                    ranks_text(missing),
                )
                backend_config = with_backend(backend_config, "gloo")
        original(self, worker_group, backend_config)

    return on_start


def defaults_to_nccl(worker_group: Any, backend_config: TorchConfig) -> bool:
    """Whether Ray would choose NCCL because the user left the backend open."""
    if backend_config.backend is not None:
        return False
    return _ray.resources_per_worker(worker_group).get("GPU", 0) > 0


def with_backend(backend_config: TorchConfig, backend: str) -> TorchConfig:
    """A copy of a config with another backend: the config itself is the user's."""
    changed = copy.copy(backend_config)
    changed.backend = backend
    return changed


def _ranks_without_nccl(worker_group: Any) -> list:
    available = worker_group.execute(dist.is_nccl_available)
    return [rank for rank, found in enumerate(available) if not found]
