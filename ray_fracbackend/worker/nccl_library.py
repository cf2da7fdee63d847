"""The NCCL library that is loaded into this process. Runs on the worker, or anywhere without Ray."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from ray_fracbackend.decide.worker_info import NcclVersion


def loaded_nccl_version() -> NcclVersion | None:
    """Return the version of the NCCL library in this process, None where there is none.

    ``torch.cuda.nccl.version()`` is the constant that torch was compiled with; a newer library by LD_PRELOAD or package
    differs from it, so the loaded library itself is asked (ncclGetVersion).
    """
    if not dist.is_nccl_available():
        return None
    for path in _loaded_paths():
        number = ctypes.c_int()
        try:
            failed = ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        if failed == 0:
            return decode_version(number.value)
    # Linked into torch itself: then the constant is the version.
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return (version[0], version[1], version[2]) if isinstance(version, tuple) and len(version) >= 3 else None


def decode_version(number: int) -> NcclVersion:
    """Decode NCCL's number: ``21805`` is 2.18.5 and ``23007`` 2.30.7; below 2.9 the number had four digits (nccl.h, NCCL_VERSION)."""
    if number < 10000:
        return number // 1000, number % 1000 // 100, number % 100
    return number // 10000, number % 10000 // 100, number % 100


def _loaded_paths() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = dict.fromkeys(re.findall(r"\s(/\S*lib[nr]ccl[^/\s]*\.so[^/\s]*)$", maps, flags=re.MULTILINE))
    preloaded = os.environ.get("LD_PRELOAD", "")
    return sorted(paths, key=lambda path: path not in preloaded)
