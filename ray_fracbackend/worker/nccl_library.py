"""The NCCL library that is loaded into this process. Runs on the worker, or anywhere without Ray."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_fracbackend.decide.worker_info import NcclVersion


def loaded_nccl_version() -> NcclVersion | None:
    """Return the version of the NCCL library that torch calls in this process, None if there is none.

    ``torch.cuda.nccl.version()`` is a constant of the torch build. LD_PRELOAD or a package may load a newer library, so
    this function calls ncclGetVersion of the library itself.
    """
    if not dist.is_nccl_available():
        return None
    number = ctypes.c_int()
    if (version := _function("ncclGetVersion")) is not None and version(ctypes.byref(number)) == 0:
        return decode_version(number.value)
    # NCCL is linked into torch itself, so the constant is the version.
    major, minor, patch, *_ = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return major, minor, patch


@contextmanager
def reason_told() -> Iterator[None]:
    """Add NCCL's reason to an error of torch 2.15, whose NCCL connects in the block, as other releases of torch do.

    Raises:
        torch.cuda.OutOfMemoryError: NCCL found no memory on the device.
    """
    try:
        yield
    except RuntimeError as error:
        if "NCCL communicator" not in str(error) or (last_error := _function("ncclGetLastError")) is None:
            raise
        last_error.restype = ctypes.c_char_p
        text = f"{error}\nLast error:\n{(last_error(None) or b'').decode('utf-8', 'replace')}"
        raise (torch.cuda.OutOfMemoryError if "out of memory" in text else RuntimeError)(text) from error


def _function(name: str) -> Any | None:
    """Return a function of the NCCL library, None if it is linked into torch.

    Another package may have loaded its own copy, so this follows the dynamic linker: first the global scope, then the
    dependencies of torch's library.
    """
    folder = f"{Path(torch.__file__).parent}/lib"
    for library in (None, f"{folder}/libtorch_cuda.so", f"{folder}/libtorch_hip.so"):
        with suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)
    return None


def decode_version(number: int) -> NcclVersion:
    """Decode NCCL's version number (NCCL_VERSION in nccl.h): ``21805`` is 2.18.5."""
    return number // 10000, number % 10000 // 100, number % 100
