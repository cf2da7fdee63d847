"""The NCCL library that is loaded into this process. Runs on the worker, or anywhere without Ray."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import torch.distributed as dist

from ray_fracbackend.decide.worker_info import NcclVersion


def loaded_nccl_version() -> NcclVersion | None:
    """Return the version of the NCCL that torch calls in this process, None where there is none.

    ``torch.cuda.nccl.version()`` is the constant that torch was compiled with; a newer library by LD_PRELOAD or package
    differs from it, so the library itself is asked (ncclGetVersion). Another package may have a copy of its own loaded, so it
    is looked up as the dynamic linker did for torch: in the global scope, then among what torch's library needs.
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
    # Linked into torch itself: then the constant is the version.
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return (version[0], version[1], version[2]) if isinstance(version, tuple) and len(version) >= 3 else None


def _torch_libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [str(path) for name in ("libtorch_cuda.so", "libtorch_hip.so") if (path := folder / name).is_file()]


def decode_version(number: int) -> NcclVersion:
    """Decode NCCL's number: ``21805`` is 2.18.5 and ``23007`` 2.30.7; below 2.9 the number had four digits (nccl.h, NCCL_VERSION)."""
    if number < 10000:
        return number // 1000, number % 1000 // 100, number % 100
    return number // 10000, number % 10000 // 100, number % 100
