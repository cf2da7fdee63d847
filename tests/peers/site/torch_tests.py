"""Load torch's tests with ``ipc`` in place of Gloo and with pre-imported processes. Only the standard library at import."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# Processes that import torch would take most of the time of a suite. `warm_process` forks them from one that has imported it.
_COLD = re.compile(rb'torch\.multiprocessing\.get_context\("spawn"\)\.Process\b')
_WARM = b'__import__("warm_process").Process'
_TORCHS_HELPERS = "torch.testing._internal"
# A separate literal, and the pair of devices and backends.
_GLOO = re.compile(rb"([\"'])gloo([\"'])|\b(cpu|cuda):gloo\b")
# Not in the lists of backends that the suite looks for in a profile: those expect calls that another thread ran.
_NAME = re.compile(rb"(?m)^(?! {4}dist\.Backend\.GLOO,$)(.*\bBackend)\.GLOO\b")
_CLASS = re.compile(rb"\b(?:c10d|dist)\.ProcessGroupGloo\(")


def on_ipc(source: bytes) -> bytes:
    """Return a test's source with ``ipc`` wherever it names Gloo as the backend."""
    source = _GLOO.sub(lambda found: found[3] + b":ipc" if found[1] is None else found[1] + b"ipc" + found[2], source)
    source = _CLASS.sub(b'__import__("replaced_gloo").group(', source)
    return _NAME.sub(rb"\1.IPC", source)


class _Loader(SourceFileLoader):
    """Read a module with changes; no bytecode is read or kept."""

    ipc = False

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        source = _COLD.sub(_WARM, self.get_data(path))
        return self.source_to_code(on_ipc(source) if self.ipc else source, path)

    def exec_module(self, module: ModuleType) -> None:
        if self.ipc:
            import replaced_gloo  # noqa: F401 (imported for what it does)
        super().exec_module(module)


class _OnIpc(_Loader):
    ipc = True


class _Finder(MetaPathFinder):
    """Find torch's own helpers for tests, and tests below a folder."""

    def __init__(self, loader: type[_Loader], tests: str) -> None:
        self._loader, self._tests = loader, tests

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith("torch.") and not name.startswith(_TORCHS_HELPERS):
            return None
        if name in sys.stdlib_module_names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        origin = spec.origin if spec is not None else None
        if origin is None or not origin.endswith(".py"):
            return None
        if not name.startswith(_TORCHS_HELPERS) and not (self._tests and origin.startswith(self._tests)):
            return None
        return importlib.util.spec_from_file_location(
            name, origin, loader=self._loader(name, origin), submodule_search_locations=spec.submodule_search_locations
        )


def provide(backend: str) -> None:
    """Make this process load torch's tests for a backend.

    Args:
        backend: ``gloo``, or ``ipc`` to replace Gloo by ``ipc``.
    """
    folder = os.environ.get("PEERS_TESTS", "")
    sys.meta_path.insert(0, _Finder(_OnIpc if backend == "ipc" else _Loader, folder and str(Path(folder).resolve())))
    multiprocessing.set_forkserver_preload(["warm_process"])
