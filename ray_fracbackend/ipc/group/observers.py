"""What watches the calls of a thread: torch's profiler, dispatch modes, tensors without data. Runs in every rank; imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from .._torch import dispatch_modes, end_record, no_dispatch_modes, start_record

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_without_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape alone: on the meta device, or of a FakeTensorMode."""
    if tensor.is_meta:
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # no such tensor without it
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def hidden(function: Callable[[], None]) -> Callable[[], None]:
    """A call of which dispatch modes, such as FakeTensorMode or FlopCounterMode, do not see what it does.

    To them it is one operation, and not the copies and additions that it is made of. A thread that waits for the call may run it, so
    the modes are those of the thread that does.
    """

    def without_modes() -> None:
        if dispatch_modes():
            with no_dispatch_modes():
                function()
        else:
            function()

    return without_modes


def recorded(operation: str, tensors: Sequence[torch.Tensor], function: Callable[[], None]) -> Callable[[], None]:
    """A call with a record in the profile that is being taken.

    Args:
        operation: Part of the record's name.
        tensors: Their shapes are in the record.
        function: Does the work. The record begins now and ends with it, in whichever thread that is.
    """
    record = start_record(f"ipc:{operation}", *tensors)

    def until_end() -> None:
        try:
            function()
        finally:
            end_record(record)

    return until_end
