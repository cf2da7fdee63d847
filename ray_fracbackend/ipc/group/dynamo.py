"""Keeps ``torch.compile`` from tracing this package. Imports torch, and not Dynamo.

Inside a compiled region Dynamo evaluates every Python frame, those too that DDP's reducer or autograd enters from C++. A
collective is not for it to trace: what it should see of one it takes from torch.distributed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .._torch import never_trace

_PACKAGE = f"{__package__.rpartition('.')[0]}."
_done: set[str] = set()


def hide_package() -> None:
    """Mark every function of the package's modules that have been loaded. May be called again, when more have been."""
    for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
        if name not in _done:
            _done.add(name)
            for code in _codes_of(sys.modules[name]):
                never_trace(code)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module.__name__:
            members = list(vars(value).values()) if isinstance(value, type) else [value]
            for member in members:
                yield from _codes_of_member(member)


def _codes_of_member(member: Any) -> Iterator[CodeType]:
    for function in (member, *(getattr(member, name, None) for name in ("fget", "__func__", "__wrapped__"))):
        if isinstance(function, FunctionType):
            yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
