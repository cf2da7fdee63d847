"""Ray Train on fractions of a GPU: workers that share a CUDA device start, are verified, and train.

from ray_fracbackend import FracTorchConfig
TorchTrainer(train_func, scaling_config=..., torch_config=FracTorchConfig())
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from ray_fracbackend.checkpoints.rank0 import report_rank0
    from ray_fracbackend.config import FracTorchConfig
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
    from ray_fracbackend.report.start_report import StartReport
    from ray_fracbackend.verify.collectives import verify_process_group
    from ray_fracbackend.verify.result import VerificationResult
    from ray_fracbackend.worker.device_check import DeviceCheck, check_devices
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
    "DeviceCheck": "worker.device_check",
    "FracTorchConfig": "config",
    "StartReport": "report.start_report",
    "VerificationResult": "verify.result",
    "check_devices": "worker.device_check",
    "get_start_report": "worker.state",
    "report_rank0": "checkpoints.rank0",
    "verify_process_group": "verify.collectives",
}


if not _typing.TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> object:
        # On first use only, so that verification and the ipc backend work in processes without Ray.
        if name in __all__:
            from importlib import import_module

            return getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'errors')}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "integrations", "ipc", "staged"]
