"""Register CPU kernels for torch's CUDA operators in every Python that ci/cuda.py starts, after it has imported torch.

Does nothing for a torch without CUDA, or if the emulated runtime is not loaded.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def _load_torch(load: Callable[[Any], None], torch: Any) -> None:
    load(torch)
    if torch.version.cuda:
        import emulated_kernels

        emulated_kernels.install()


def _load_refs(load: Callable[[Any], None], refs: Any) -> None:
    """Load torch._refs, which computes result shapes, so that their first call does not import torch._dynamo."""
    torch = sys.modules["torch"]
    real, torch._disable_dynamo = torch._disable_dynamo, lambda function: function  # type: ignore[attr-defined]
    try:
        load(refs)
    finally:
        torch._disable_dynamo = real  # type: ignore[attr-defined]


class _Finder:
    """Find torch and torch._refs and patch their loading: importing torch here would slow down every start."""

    def __init__(self) -> None:
        self._loads = {"torch": _load_torch, "torch._refs": _load_refs}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        own = self._loads.pop(name, None)
        if own is None:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None and hasattr(ctypes.CDLL(None), "rig_launch"):
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: own(load, module)  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
