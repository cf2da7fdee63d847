"""Interaction with torch's profiler, dispatch modes, tensors without data, and ``torch.compile``. Imports torch.

Inside a compiled region Dynamo evaluates every Python frame, also those that DDP's reducer or autograd enters from C++.
It must not trace into this package: it handles collectives at the level of torch.distributed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from .._torch import dispatch_modes, end_record, never_trace, no_dispatch_modes, start_record

PLAIN = (torch.Tensor, torch.nn.Parameter)
_PACKAGE = f"{__package__.rpartition('.')[0]}."
# Modules whose functions Dynamo skips.
_skipped: set[str] = set()


def is_without_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape but no data: on the meta device, or of a FakeTensorMode."""
    if tensor.is_meta:
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # not imported: no fake tensors exist
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def run_hidden(function: Callable[[], None]) -> None:
    """Run a call without the dispatch modes of this thread, such as FakeTensorMode or FlopCounterMode.

    A mode must not see the copies and additions inside a collective. A thread that waits for a call may run it, so the
    modes of the running thread are disabled.
    """
    if dispatch_modes():
        with no_dispatch_modes():
            function()
    else:
        function()


def recorded(operation: str, tensors: Sequence[torch.Tensor], function: Callable[[], None]) -> Callable[[], None]:
    """Wrap a call in a record of the active profiler.

    Args:
        operation: Part of the record's name.
        tensors: The record contains their shapes.
        function: Does the work. The record begins now and ends when `function` returns, in any thread.
    """
    record = start_record(f"ipc:{operation}", *tensors)

    def until_end() -> None:
        try:
            function()
        finally:
            end_record(record)

    return until_end


def hide_package() -> None:
    """Make Dynamo skip every function in the loaded modules of this package. Call again after further imports."""
    for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
        if name not in _skipped:
            _skipped.add(name)
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
