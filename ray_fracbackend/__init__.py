"""Ray Train on fractions of a GPU: workers that share a CUDA device start, are verified, and train.

from ray_fracbackend import FracTorchConfig
TorchTrainer(train_func, scaling_config=..., torch_config=FracTorchConfig())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_fracbackend.checkpoint import report_rank0
    from ray_fracbackend.config import FracTorchConfig
    from ray_fracbackend.device_check import DeviceCheck, check_devices
    from ray_fracbackend.errors import (
        BackendUnavailableError,
        FracBackendError,
        GroupFormationError,
        IncompatibleWorkersError,
        InsufficientResourcesError,
        MissingDeviceError,
        OutOfMemoryError,
        PortInUseError,
        RendezvousError,
        SharedDeviceError,
        StartTimeoutError,
        UnreachableMasterError,
        VerificationError,
        WorkerDiedError,
    )
    from ray_fracbackend.report import StartReport
    from ray_fracbackend.verify import VerificationResult, verify_process_group
    from ray_fracbackend.worker.state import get_start_report

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "DeviceCheck",
    "FracBackendError",
    "FracTorchConfig",
    "GroupFormationError",
    "IncompatibleWorkersError",
    "InsufficientResourcesError",
    "MissingDeviceError",
    "OutOfMemoryError",
    "PortInUseError",
    "RendezvousError",
    "SharedDeviceError",
    "StartReport",
    "StartTimeoutError",
    "UnreachableMasterError",
    "VerificationError",
    "VerificationResult",
    "WorkerDiedError",
    "check_devices",
    "get_start_report",
    "report_rank0",
    "verify_process_group",
]

_MODULE_OF = {
    "DeviceCheck": "device_check",
    "FracTorchConfig": "config",
    "StartReport": "report",
    "VerificationResult": "verify",
    "check_devices": "device_check",
    "get_start_report": "worker.state",
    "report_rank0": "checkpoint",
    "verify_process_group": "verify",
}


def __getattr__(name: str) -> Any:
    # On first use only, so that verification and the ipc backend work in processes without Ray.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'errors')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
