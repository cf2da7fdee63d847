"""Interaction with torch's profiler, dispatch modes, tensors without data, torch.func and ``torch.compile``. Imports torch.

Inside a compiled region Dynamo evaluates every Python frame, also those that DDP's reducer or autograd enters from C++.
It must not trace into this package: it handles collectives at the level of torch.distributed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from .._torch import (
    active_transform,
    dispatch_modes,
    end_record,
    functorch,
    never_trace,
    no_dispatch_modes,
    no_transforms,
    start_record,
)

PLAIN = (torch.Tensor, torch.nn.Parameter)
_DENORMAL = 5e-324
_PACKAGE = f"{__package__.rpartition('.')[0]}."
# Modules whose functions Dynamo skips.
_skipped: set[str] = set()


def is_without_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape but no data: on the meta device, or of a FakeTensorMode."""
    if tensor.is_meta:
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # not imported: no fake tensors exist
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def flushes_denormals() -> bool:
    """Return whether this thread replaces denormal numbers by zero, which ``torch.set_flush_denormal`` sets."""
    return _DENORMAL * 1.0 == 0.0


def run_hidden(function: Callable[[], None], flushes: bool) -> None:
    """Run a call without the dispatch modes of this thread, such as FlopCounterMode, and without transforms of torch.func.

    They must not see the copies and additions inside a collective. A thread that waits for a call may run it, so those of
    the running thread are disabled.

    Args:
        function: The call.
        flushes: `flushes_denormals` of the thread that made it, so that the result does not depend on the one that runs it.
    """
    before = flushes_denormals()
    if flushes != before:
        torch.set_flush_denormal(flushes)
    try:
        if dispatch_modes() or active_transform() is not None:
            with no_dispatch_modes(), no_transforms():
                function()
        else:
            function()
    finally:
        if flushes != before:
            torch.set_flush_denormal(before)


def outside_transforms(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a call outside the transforms of torch.func of this thread, with the tensors inside those of the transforms.

    As with Gloo: the transform sees neither the call nor its result, so a gradient does not flow between ranks.

    Raises:
        TypeError: The call has a tensor of ``torch.vmap`` or ``functionalize``.
    """
    inner, named = [_inner(value) for value in args], {name: _inner(value) for name, value in kwargs.items()}
    with no_transforms():
        return call(*inner, **named)


def _inner(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_inner(item) for item in value]
    while isinstance(value, torch.Tensor) and functorch.is_functorch_wrapped_tensor(value):
        if not functorch.is_gradtrackingtensor(value):
            name = "torch.vmap" if functorch.is_batchedtensor(value) else "torch.func.functionalize"
            raise TypeError(
                f"A collective got a tensor of {name}, which cannot transform collectives; call the collective outside of it."
            )
        value = functorch.get_unwrapped(value)
    return value


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
