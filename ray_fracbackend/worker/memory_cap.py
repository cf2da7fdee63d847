"""Limit the CUDA memory of a process and add the limit to its OutOfMemoryError. Runs on the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ray_fracbackend.worker.state import STATE

_GIB = 1 << 30


def set_cap(fraction: float | None, device: torch.device | str = "cuda") -> None:
    """Cap the memory of torch's allocator in this process; None removes the cap of an earlier start.

    Memory outside the allocator is not counted: the CUDA context, NCCL's buffers, memory of other libraries.

    Args:
        fraction: Share of the device's memory, from 0 to 1.
        device: torch device.
    """
    if STATE.memory_cap is not None:
        torch.cuda.set_per_process_memory_fraction(1.0, STATE.memory_cap[1])
        STATE.memory_cap = None
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, torch.device(device))
        STATE.memory_cap = (fraction, torch.device(device))


@contextmanager
def explain_out_of_memory(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter another context, and add the cap to an OutOfMemoryError, or an error caused by one, that leaves it.

    Args:
        context: Creates the context that Ray Train would otherwise enter.

    Raises:
        torch.cuda.OutOfMemoryError: The body raised it; the message also contains the cap, the fraction and the advice.
    """
    with context():
        try:
            yield
        except Exception as error:
            # V1 raises its own error without a message from the train function's error.
            cause = error if isinstance(error, torch.cuda.OutOfMemoryError) else error.__cause__
            if STATE.memory_cap is None or not isinstance(cause, torch.cuda.OutOfMemoryError):
                raise
            fraction, device = STATE.memory_cap
            total, held = torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_reserved(device)
            raise torch.cuda.OutOfMemoryError(
                f"{str(error) or cause}\nlimit_gpu_memory=True caps this worker at its fraction {fraction:g} of {device}: "
                f"{total * fraction / _GIB:.2f} of {total / _GIB:.2f} GiB, of which torch holds {held / _GIB:.2f}. Use a smaller "
                "batch or model, ask for a larger GPU fraction per worker, or start without limit_gpu_memory."
            ) from error
