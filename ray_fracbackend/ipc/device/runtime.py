"""CUDA as the ipc backend uses it: memory, streams, events and futures of one device. Imports torch.

Everything that needs a GPU is behind this one class, so that the tests put streams of their own in its place. Streams
and events are those of `torch.cuda`, or what behaves like them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from .driver import DeviceBlock, allocate, export_block, open_block, release
from .support import device_memory_support


class CudaRuntime:
    """One CUDA device.

    Args:
        device: With an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index: int = device.index

    @staticmethod
    def owns(tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a CUDA device."""
        return tensor.is_cuda

    def missing(self) -> str | None:
        """See `device_support.device_memory_support`."""
        return device_memory_support(self._index)

    def uuid(self) -> str:
        """Identity of the device, equal in all processes whatever its index there."""
        return str(torch.cuda.get_device_properties(self._index).uuid)

    def allocate(self, num_bytes: int) -> DeviceBlock:
        """Memory that other processes can map; see `cuda_driver.allocate`."""
        return allocate(self._index, num_bytes)

    def trim(self) -> None:
        """Give what torch's allocator keeps for later back to the device."""
        torch.cuda.empty_cache()

    def export(self, block: DeviceBlock) -> bytes:
        """What another process needs for `open`."""
        return export_block(block)

    def open(self, handle: bytes, num_bytes: int) -> DeviceBlock:
        """Map another process's memory; see `cuda_driver.open_block`."""
        return open_block(self._index, handle, num_bytes)

    def release(self, block: DeviceBlock) -> None:
        """Free or unmap; see `cuda_driver.release`."""
        release(block)

    def new_stream(self) -> Any:
        """A stream of the device."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """The calling thread's stream."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` and its device the calling thread's."""
        return torch.cuda.stream(stream)

    def is_capturing(self) -> bool:
        """Whether the calling thread's stream is being captured in a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def new_event(self) -> Any:
        """An event of this process."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def new_shared_event(self) -> Any:
        """An event that can be exported once it has been recorded."""
        return torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]

    def export_event(self, event: Any) -> bytes:
        """What another process needs for `open_event`."""
        handle: bytes = event.ipc_handle()
        return handle

    def open_event(self, handle: bytes) -> Any:
        """Another process's event."""
        return torch.cuda.Event.from_ipc_handle(self.device, handle)  # type: ignore[no-untyped-call]

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses the tensor, so that its memory is not given away too early."""
        tensor.record_stream(stream)

    def new_future(self) -> torch.futures.Future[Any]:
        """A future whose waiter's stream waits for the work behind the value, as that of NCCL's."""
        return torch.futures.Future(devices=[self.device])

    def complete(self, future: torch.futures.Future[Any], value: Any, stream: Any) -> None:
        """Set the result of `future` behind the work on `stream` so far."""
        with torch.cuda.stream(stream):
            future.set_result(value)
