"""The cap on a worker's CUDA memory, and the message of its OutOfMemoryError. Runs on the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from ray_fracbackend.worker.state import STATE

_GIB = 1 << 30


@dataclass(frozen=True)
class MemoryCap:
    """What torch's allocator may take in this process.

    Attributes:
        fraction: Share of the device's memory, in 0 to 1.
        device: torch device that it holds for.
    """

    fraction: float
    device: torch.device

    @property
    def text(self) -> str:
        """The cap and what of it is taken, in GiB."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        reserved = torch.cuda.memory_reserved(self.device)
        return (
            f"limit_gpu_memory=True caps this worker at its fraction {self.fraction:g} of {self.device}: "
            f"{total * self.fraction / _GIB:.2f} of {total / _GIB:.2f} GiB, of which torch holds {reserved / _GIB:.2f}"
        )


def set_cap(fraction: float | None, device: torch.device | str = "cuda") -> None:
    """Cap what torch's allocator takes of a device in this process; None removes the cap of an earlier start.

    It does not count what is outside of the allocator: the CUDA context, NCCL's buffers, memory of other libraries.

    Args:
        fraction: Share of the device's memory, in 0 to 1.
        device: torch device.
    """
    if STATE.memory_cap is not None:
        torch.cuda.set_per_process_memory_fraction(1.0, STATE.memory_cap.device)
        STATE.memory_cap = None
    if fraction is not None:
        cap = MemoryCap(fraction, torch.device(device))
        torch.cuda.set_per_process_memory_fraction(cap.fraction, cap.device)
        STATE.memory_cap = cap


@contextmanager
def explain_out_of_memory(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Run a train function's body in another context; out of memory leaves it with the cap in its message.

    Args:
        context: Makes the context that Ray Train would enter by itself.

    Raises:
        torch.cuda.OutOfMemoryError: The body raised it; the same with the cap, the fraction and what to do.
    """
    with context():
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            if STATE.memory_cap is None:
                raise
            raise torch.cuda.OutOfMemoryError(
                f"{error}\n{STATE.memory_cap.text}. Use a smaller batch or model, ask for a larger GPU fraction a worker, or start without "
                "limit_gpu_memory."
            ) from error
