"""The counters of the emulated CUDA runtime, for tests and benchmarks that run on it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Counters:
    """Counts of a process's calls to its devices, in the order of ``Counters`` in ci/cuda/runtime.hpp.

    Attributes:
        kernels: Kernels launched.
        kernel_bytes: Bytes of the tensors that they read and write.
        device_copy_bytes: Bytes copied on the device.
        to_device_bytes: Bytes copied from the host.
        to_host_bytes: Bytes copied to the host.
        event_records: Events recorded.
        event_waits: Waits of a stream for an event of this process.
        peer_event_waits: Waits of a stream for an event of another process.
        word_writes: Words that a stream writes.
        word_waits: Waits of a stream for a word.
        slice_waits: Times that a kernel or copy waited for its process's time slice, with ``--like gpu``.
        host_waits: Calls in which the host waits for the device.
        host_polls: Polls of the host for unfinished work.
        contexts: Contexts created.
        device_bytes: Device memory of the process in bytes.
        peak_device_bytes: Its maximum.
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
    slice_waits: int = 0
    host_waits: int = 0
    host_polls: int = 0
    contexts: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0

    def since(self, before: Counters) -> Counters:
        """Return the difference to an earlier state; the peak is unchanged."""
        grown = {field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        return Counters(**{**grown, "peak_device_bytes": self.peak_device_bytes})


def counters() -> Counters:
    """Return the counters of this process."""
    values = (ctypes.c_uint64 * len(fields(Counters)))()
    if ctypes.CDLL(None).rig_counters(values, len(values)) != len(values):
        raise RuntimeError("rig_counters.py and ci/cuda/runtime.hpp have different counters")
    return Counters(*values)


def count_all_reduce(size: int, dtype: torch.dtype, device: torch.device) -> Counters:
    """Return the counts of one all_reduce on this rank, after some similar calls in the group; check the result."""
    import torch
    import torch.distributed as dist

    tensor = torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
    # The first calls of a kind also wait for the ranks that read data of earlier calls in the slots.
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
