"""FracTorchConfig, the class that users swap in for ray.train.torch.TorchConfig. Driver side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ray.train.backend import BackendConfig
from ray.train.torch import TorchConfig

from ray_fracbackend.backend import FracTorchBackend
from ray_fracbackend.decide.settings import Settings, names_checked
from ray_fracbackend.log import logger
from ray_fracbackend.worker.memory_cap import explain_out_of_memory
from ray_fracbackend.wrong_config import not_a_config, property_of_an_object


@names_checked
@dataclass(repr=False)
class FracTorchConfig(Settings, TorchConfig):  # type: ignore[misc]
    """Start torch process groups for Ray Train workers that may share CUDA devices.

    A drop-in for ``ray.train.torch.TorchConfig``, with the same result where every worker has a device of its own.

    Args:
        backend: ``auto`` chooses one for the workers' devices; ``nccl``, ``gloo``, ``ipc``, ``staged`` or a pair such as
            ``cpu:gloo,cuda:nccl`` selects it by name; any other name is passed on to Ray Train. None and an empty string mean
            ``auto``; names are case-insensitive, as in torch.
        init_method: ``env`` or ``tcp``, as in TorchConfig.
        timeout_s: Seconds for collectives to time out once training runs, as in TorchConfig.
        on_shared_device: What to do when ranks share a device: ``auto``, ``ipc``, ``staged`` (CUDA tensors through host
            memory), ``gloo``, ``nccl`` (NCCL's own multi-rank flags, 2.30 or newer) or ``error``.
        on_missing_cuda: What to do when Ray assigned GPUs that torch cannot use: ``error``, or ``cpu`` to train on the CPU.
        verify: Verify the group with collectives of known results before training starts.
        start_timeout_s: Time limit in seconds for rendezvous and verification together, after all workers have answered the
            probe. The probe, which includes the imports of the workers, has a separate limit of the same length. After a
            failure, a search for the rank or link at fault may add a quarter of it, 60 s at most.
        master_addr: Address of rank 0's node that all other nodes reach, instead of the address that Ray knows.
        master_port: Port on rank 0's node, or an inclusive range ``(low, high)`` to choose one from.
        limit_gpu_memory: Cap each worker's CUDA memory at its fraction of the device. In a worker that needs more, torch
            raises its OutOfMemoryError, and the other workers keep their part; workers with whole devices have no cap.

    Raises:
        TypeError: There is no setting of this name, or it cannot be positional; the message suggests the right one.
        ValueError: A setting breaks its rule; the message has value, rule and fix.

    Example::

        TorchTrainer(train_func, scaling_config=..., torch_config=FracTorchConfig())
    """

    @property_of_an_object
    def backend_cls(self) -> type[FracTorchBackend]:
        """Ray Train backend class of this configuration."""
        return FracTorchBackend

    @property_of_an_object
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Context around the train function: Ray's; with limit_gpu_memory it also annotates OutOfMemoryError."""
        context: Callable[[], AbstractContextManager[None]] = super().train_func_context
        return partial(explain_out_of_memory, context) if self.limit_gpu_memory else context

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values, for Ray Train's state export."""
        return self.to_plain()


def frac_config(config: TorchConfig | None, settings: Mapping[str, Any]) -> TorchConfig:
    """Return the configuration to use instead of a script's own.

    Args:
        config: The script's own, None if it has none. A FracTorchConfig is used unchanged, and so is the configuration of any
            other backend.
        settings: Settings of FracTorchConfig that override the script's.

    Raises:
        TypeError: ``config`` is a class, or not a configuration; the message has the fix.
        ValueError: A setting breaks its rule.
    """
    if not config:  # as TorchTrainer reads it
        return FracTorchConfig(**settings)
    if not isinstance(config, BackendConfig):
        raise TypeError(not_a_config(config))
    if type(config) is not TorchConfig:
        if not isinstance(config, FracTorchConfig):
            logger.warning(
                "%s is used unchanged: FracTorchConfig replaces only plain TorchConfig objects", type(config).__name__
            )
        return config
    own = {each.name: getattr(config, each.name) for each in fields(TorchConfig) if each.init}
    return FracTorchConfig(**{**own, **settings})
