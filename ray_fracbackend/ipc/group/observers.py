"""Support for observers of a call: torch's profiler, dispatch modes, fake tensors, ``torch.compile``. Imports torch.

Inside a compiled region Dynamo evaluates every Python frame, including frames that DDP's reducer or autograd enters
from C++. It must not trace a collective: torch.distributed provides what Dynamo should see of one.
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
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # without this module no FakeTensor exists
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def run_hidden(function: Callable[[], None]) -> None:
    """Run a call hidden from this thread's dispatch modes, such as FakeTensorMode or FlopCounterMode.

    They must see one operation, and not its copies and additions. A thread that waits for the call can run it, and
    the modes of the thread that runs it are disabled.
    """
    if dispatch_modes():
        with no_dispatch_modes():
            function()
    else:
        function()


def recorded(operation: str, tensors: Sequence[torch.Tensor], function: Callable[[], None]) -> Callable[[], None]:
    """Wrap a call in a record of the running profiler.

    Args:
        operation: Part of the record's name.
        tensors: The record contains their shapes.
        function: Runs the call. The record begins now and ends with the call, in any thread.
    """
    record = start_record(f"ipc:{operation}", *tensors)

    def until_end() -> None:
        try:
            function()
        finally:
            end_record(record)

    return until_end


def hide_package() -> None:
    """Exclude functions of the package's loaded modules from Dynamo; call again after more are loaded."""
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
