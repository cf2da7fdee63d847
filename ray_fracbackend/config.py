"""FracTorchConfig, the class that users swap in for ray.train.torch.TorchConfig. Driver side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.train.torch import TorchConfig

from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.start.backend import FracTorchBackend
from ray_fracbackend.worker.memory_cap import explain_out_of_memory
from ray_fracbackend.worker.nccl_env import late_nccl_env_logged


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
            probe. The probe, which includes the imports of the workers, has a separate limit of the same length from the
            first worker's answer on; the first worker may take three times as long. After a failure, a search for the
            rank, device or link at fault may add a quarter of it, 15 s at most.
        master_addr: Address of rank 0's node that all other nodes reach, instead of the address that Ray knows.
        master_port: Port on rank 0's node, or an inclusive range ``(low, high)`` to choose one from.
        limit_gpu_memory: Cap each worker's CUDA memory at its fraction of the device. In a worker that needs more, torch
            raises its OutOfMemoryError, and the other workers keep their part; workers with whole devices have no cap.

    Raises:
        ValueError: A setting breaks its rule; the message has value, rule and fix.

    Example::

        TorchTrainer(train_func, scaling_config=..., torch_config=FracTorchConfig())
    """

    @property
    def backend_cls(self) -> type[FracTorchBackend]:
        """Ray Train backend class of this configuration."""
        return FracTorchBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Context around the train function: Ray's, with a warning about late NCCL variables and the cause of an OutOfMemoryError."""
        context = partial(late_nccl_env_logged, super().train_func_context)
        return partial(explain_out_of_memory, context) if self.limit_gpu_memory else context

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values, for Ray Train's state export."""
        return self.to_plain()
