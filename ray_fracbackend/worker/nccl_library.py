"""The NCCL library that is loaded into this process. Runs on the worker, or anywhere without Ray."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import torch.distributed as dist

from ray_fracbackend.decide.worker_info import NcclVersion


def loaded_nccl_version() -> NcclVersion | None:
    """Return the version of the NCCL library that torch calls in this process, None if there is none.

    ``torch.cuda.nccl.version()`` is a constant of the torch build. LD_PRELOAD or a package may load a newer library, so
    this function calls ncclGetVersion of the library itself. Another package may have loaded its own copy. The lookup
    therefore follows the dynamic linker: first the global scope, then the dependencies of torch's library.
    """
    if not dist.is_nccl_available():
        return None
    for name in (None, *_torch_libraries()):
        number = ctypes.c_int()
        try:
            failed = ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        if failed == 0:
            return decode_version(number.value)
    # NCCL is linked into torch itself, so the constant is the version.
    major, minor, patch, *_ = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return major, minor, patch


def _torch_libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [str(path) for name in ("libtorch_cuda.so", "libtorch_hip.so") if (path := folder / name).is_file()]


def decode_version(number: int) -> NcclVersion:
    """Decode NCCL's version number (NCCL_VERSION in nccl.h): ``21805`` is 2.18.5."""
    return number // 10000, number % 10000 // 100, number % 100
