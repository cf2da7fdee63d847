"""Emulate Windows' file sharing in every Python that ci/wine.py starts: a file that is being copied is not shared.

pyarrow copies local files with Windows' CopyFileW, which opens its destination exclusively. A second copy to the same
file fails with ERROR_SHARING_VIOLATION, ``[WinError 32]``. Wine's CopyFileW shares the file. Here files are copied
through a handle that is not shared, so Wine itself refuses the second copy.
"""

from __future__ import annotations

import _winapi
import functools
import importlib.util
import msvcrt
import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_CREATE_ALWAYS = 2


class _AfterPyarrow:
    """Find pyarrow.fs once and patch it after it has been loaded: importing it here would slow down every start."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "pyarrow.fs":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                module.copy_files = _unshared(module.copy_files, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _unshared(copy_files: Any, fs: Any) -> Any:
    @functools.wraps(copy_files)
    def copy(
        source: str, destination: str, source_filesystem: Any = None, destination_filesystem: Any = None, **options: Any
    ) -> None:
        both_local = all(isinstance(each, fs.LocalFileSystem) for each in (source_filesystem, destination_filesystem))
        if not both_local or not os.path.isdir(source):
            copy_files(source, destination, source_filesystem, destination_filesystem, **options)
            return
        for folder, _, names in os.walk(source):
            target = os.path.join(destination, os.path.relpath(folder, source))
            os.makedirs(target, exist_ok=True)
            for name in names:
                _copy_file(os.path.join(folder, name), os.path.join(target, name))

    return copy


def _copy_file(source: str, destination: str) -> None:
    handle = _winapi.CreateFile(destination, _winapi.GENERIC_WRITE, 0, 0, _CREATE_ALWAYS, 0, 0)
    with (
        os.fdopen(msvcrt.open_osfhandle(handle, 0), "wb") as output,
        open(source, "rb") as input_,
    ):
        shutil.copyfileobj(input_, output, 1 << 20)


sys.meta_path.insert(0, _AfterPyarrow())  # type: ignore[arg-type]
