"""FracTorchConfig, the class that users swap in for ray.train.torch.TorchConfig. Driver side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.train.torch import TorchConfig

from ray_fracbackend.backend import FracTorchBackend
from ray_fracbackend.options import StartOptions, setting_names


@dataclass
class FracTorchConfig(TorchConfig):  # type: ignore[misc]
    """Starts torch process groups for Ray Train workers that may share CUDA devices.

    A drop-in for ``ray.train.torch.TorchConfig``. Where every worker has a device of its own it does what that does.

    Args:
        backend: ``auto`` decides from what the workers sit on; ``nccl``, ``gloo``, ``ipc`` or a pair such as
            ``cpu:gloo,cuda:nccl`` asks for one; any other name is left to Ray Train. None means ``auto``.
        init_method: ``env`` or ``tcp``, as in TorchConfig.
        timeout_s: Seconds for collectives to time out once training runs, as in TorchConfig.
        on_shared_device: What to do when ranks share a device: ``auto``, ``ipc``, ``gloo``, ``nccl`` (NCCL's own
            multi-rank flags, 2.30 or newer) or ``error``.
        on_missing_cuda: What to do when Ray gave GPUs that torch cannot use: ``error``, or ``cpu`` to train there.
        verify: Check the group with collectives of known answers before training starts.
        start_timeout_s: Bound on rendezvous and verification together, in seconds.
        master_addr: Address of rank 0's node that all others reach, instead of the one that Ray knows.
        master_port: Port on rank 0's node, or an inclusive range ``(low, high)`` to take one from.
        limit_gpu_memory: Cap each worker's CUDA memory at its fraction of the device.

    Raises:
        ValueError: A setting breaks its rule; the message has value, rule and fix.

    Example::

        TorchTrainer(train_func, scaling_config=..., torch_config=FracTorchConfig())
    """

    backend: str | None = "auto"
    on_shared_device: str = field(default="auto", kw_only=True)
    on_missing_cuda: str = field(default="error", kw_only=True)
    verify: bool = field(default=True, kw_only=True)
    start_timeout_s: float = field(default=120.0, kw_only=True)
    master_addr: str | None = field(default=None, kw_only=True)
    master_port: int | tuple[int, int] | None = field(default=None, kw_only=True)
    limit_gpu_memory: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        # TorchTrainer replaces a falsy backend by "nccl" or "gloo" before the start can look at the workers.
        if self.backend is None:
            self.backend = "auto"
        StartOptions.from_config(self)

    @property
    def backend_cls(self) -> type[FracTorchBackend]:
        """The Ray Train backend that carries this configuration out."""
        return FracTorchBackend

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, for Ray Train's state export."""
        values = {name: getattr(self, name) for name in setting_names()}
        if isinstance(self.master_port, tuple):
            values["master_port"] = list(self.master_port)
        return values
