"""The counters of the emulated CUDA runtime, for tests and benchmarks that run on it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Counters:
    """What a process asked its devices for since it began, in the order of ``Counters`` in ci/cuda/runtime.hpp.

    Attributes:
        kernels: Kernels launched.
        kernel_bytes: Bytes of the tensors that they read and write.
        device_copy_bytes: Bytes copied on the device.
        to_device_bytes: Bytes copied from the host.
        to_host_bytes: Bytes copied to the host.
        event_records: Events recorded.
        event_waits: Waits of a stream for an event of this process.
        peer_event_waits: Waits of a stream for an event of another process.
        word_writes: Words that a stream is to write.
        word_waits: Waits of a stream for a word.
        host_waits: Calls in which the host waits for the device.
        host_polls: Looks of the host at work that is not done.
        contexts: Contexts made.
        device_bytes: Device memory of the process.
        peak_device_bytes: The most that it was.
    """

    kernels: int = 0
    kernel_bytes: int = 0
    device_copy_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    event_records: int = 0
    event_waits: int = 0
    peer_event_waits: int = 0
    word_writes: int = 0
    word_waits: int = 0
    host_waits: int = 0
    host_polls: int = 0
    contexts: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0

    def since(self, before: Counters) -> Counters:
        """Return what was added to an earlier state; the peak as it is."""
        grown = {field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        return Counters(**{**grown, "peak_device_bytes": self.peak_device_bytes})


def counters() -> Counters:
    """Return the counters of this process."""
    values = (ctypes.c_uint64 * len(fields(Counters)))()
    if ctypes.CDLL(None).rig_counters(values, len(values)) != len(values):
        raise RuntimeError("rig_counters.py and ci/cuda/runtime.hpp have different counters")
    return Counters(*values)


def count_all_reduce(size: int, dtype: torch.dtype, device: torch.device) -> Counters:
    """Return what one all_reduce takes on this rank, in a group that has done some like it before; checks the result."""
    import torch
    import torch.distributed as dist

    tensor = torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
    # The first ones of a kind also wait for those that read what other calls have left in the slots.
    for number in range(4):
        tensor.fill_(1)
        torch.cuda.synchronize(device)
        dist.barrier()
        before = counters()
        dist.all_reduce(tensor)
        found = counters().since(before)
        torch.cuda.synchronize(device)
        if not bool((tensor == dist.get_world_size()).all()):
            raise RuntimeError(f"call {number} of {size} bytes is wrong")
    return found
