"""CUDA: device memory that other processes can map, and words for streams, by the driver's own calls. Imports torch.

torch can share storages too, but its way leaves a counter file in /dev/shm when a process is killed, keeps freed memory
until all receivers let go, and depends on how the caching allocator is configured (expandable segments, cudaMallocAsync).
Memory from ``cuMemAlloc`` can always be exported.

Source: CUDA driver API, "Memory Management" (cuIpc*), "Primary Context Management" and "Stream Memory Operations".
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

import torch

from .._torch import storage_at
from ..host.support import host_memory_support
from .runtime import AcceleratorRuntime

# Smaller allocations may lie in a block with others, and a handle opens the whole block (cudaIpcGetMemHandle).
GRANULARITY_BYTES = 1 << 21
# Operations in one call of cuStreamBatchMemOp, which takes fewer than 256.
_MAX_OPERATIONS = 255
# CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_HAS_64_BIT_STREAM_MEM_OPS = 122
_OUT_OF_MEMORY = 2
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_REGISTER_FLAGS = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTREGISTER_DEVICEMAP
# CU_STREAM_MEM_OP_WAIT_VALUE_64 and CU_STREAM_MEM_OP_WRITE_VALUE_64
_WAIT, _WRITE = 4, 5
# CU_STREAM_WAIT_VALUE_GEQ, and CU_STREAM_WRITE_VALUE_DEFAULT: a barrier for memory comes before the write
_DEFAULT = 0


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``: what another process needs to map memory."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _WordOperation(ctypes.Structure):
    """``CUstreamBatchMemOpParams``: a wait for a 64-bit word, or a write of one. The union has 48 bytes."""

    _fields_ = [
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint64 * 2),
    ]


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    except (OSError, AttributeError) as error:
        raise DriverError(f"the CUDA driver library cannot be used: {error}") from error
    return library


def call(name: str, *args: Any) -> None:
    """Call a function of the driver.

    Raises:
        MemoryError: The device has not as much memory.
        DriverError: The driver refuses.
    """
    library = _library()
    code = getattr(library, name)(*args)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        message = f"{name}: {(text.value or str(code).encode()).decode()}"
        raise MemoryError(message) if code == _OUT_OF_MEMORY else DriverError(message)


def call_on(index: int, name: str, *args: Any) -> None:
    """`call` in the context of a device: the calling thread may have none yet, or that of another device."""
    call("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        call(name, *args)
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    # Kept for good: it is torch's own context, and releasing it early would free the memory in it.
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(index))
    return context


def _device(index: int) -> ctypes.c_int:
    call("cuInit", 0)
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    return device


def has_timelines(index: int) -> bool:
    """Return whether streams of a visible device can write 64-bit words and wait for them, as it says; makes no context.

    Raises:
        DriverError: The driver cannot be used.
    """
    value, device = ctypes.c_int(0), _device(index)
    code = _library().cuDeviceGetAttribute(ctypes.byref(value), _HAS_64_BIT_STREAM_MEM_OPS, device)
    # Drivers before CUDA 11.7 do not know the question, nor the calls.
    return code == 0 and bool(value.value)


def device_memory_support(device_index: int = 0) -> str | None:
    """Return whether the ipc backend can use the memory of a CUDA device between processes of this machine.

    Needs no process group. What only several processes can find out (a MIG slice, a container without the host's
    process ids) is found out when a group is set up, which falls back to Gloo.

    Args:
        device_index: torch's index of the device in this process.

    Returns:
        None if it can, as far as one process can find out, else the reason in one sentence.
    """
    if sys.platform != "linux":
        return f"CUDA memory is shared between processes on Linux only, and this is {sys.platform}"
    reason = host_memory_support()
    if reason is not None:
        return reason
    if "tegra" in platform.release().lower():
        return "this is a Tegra, where CUDA memory cannot be shared between processes"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not 0 <= device_index < torch.cuda.device_count():
        return f"there is no device {device_index} among the {torch.cuda.device_count()} that torch sees"
    try:
        if not has_timelines(device_index):
            return f"streams of device {device_index} cannot wait for memory (driver before CUDA 11.7?)"
    except DriverError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class DeviceBlock:
    """Device memory, one's own or another process's.

    Attributes:
        pointer: Address on the device, in this process.
        imported: It belongs to another process.
        bytes: The memory as a uint8 tensor, 1-D; it must not be used once the block is released.
    """

    pointer: int
    imported: bool
    bytes: torch.Tensor


class CudaRuntime(AcceleratorRuntime):
    """One CUDA device, whose memory ranks of other processes can map."""

    @staticmethod
    def owns(tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on a CUDA device."""
        return tensor.is_cuda

    def missing(self) -> str | None:
        """See `device_memory_support`."""
        return device_memory_support(self._index)

    def uuid(self) -> str:
        """Return the identity of the device, equal in all processes whatever its index there, of a MIG slice its own."""
        raw = (ctypes.c_ubyte * 16)()
        call("cuDeviceGetUuid_v2", raw, _device(self._index))  # the first version names the parent of a slice
        return str(UUID(bytes=bytes(raw)))

    def allocate(self, num_bytes: int) -> DeviceBlock:
        """Allocate memory that other processes can map, rounded up to 2 MiB.

        Raises:
            MemoryError: The device has not as much.
        """
        num_bytes, pointer = -(-num_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES, ctypes.c_uint64()
        call_on(self._index, "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        return self._block(pointer.value, num_bytes, imported=False)

    def trim(self) -> None:
        """Give what torch's allocator caches back to the device."""
        torch.cuda.empty_cache()

    def export(self, block: DeviceBlock) -> bytes:
        """Return what another process needs for `open`."""
        handle = _Handle()
        call_on(self._index, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(block.pointer))
        return bytes(handle.reserved)

    def open(self, handle: bytes, num_bytes: int) -> DeviceBlock:
        """Map another process's memory; `num_bytes` is what it asked for.

        Raises:
            DriverError: The driver does not let this process have it.
        """
        pointer, source = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        call_on(self._index, "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), source, _LAZY_ENABLE_PEER_ACCESS)
        return self._block(pointer.value, num_bytes, imported=True)

    def _block(self, pointer: int, num_bytes: int, imported: bool) -> DeviceBlock:
        with torch.inference_mode(False):
            storage = storage_at(pointer, self.device, num_bytes)
            data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        return DeviceBlock(pointer, imported, data)

    def release(self, block: DeviceBlock) -> None:
        """Free or unmap. The device must be through with it; other processes must have unmapped what is freed."""
        name = "cuIpcCloseMemHandle" if block.imported else "cuMemFree_v2"
        call_on(self._index, name, ctypes.c_uint64(block.pointer))

    def register(self, address: int, num_bytes: int) -> int:
        """Let streams read and write memory of the host; returns its address on the device.

        Raises:
            DriverError: The driver does not take it.
        """
        pointer, at = ctypes.c_uint64(), ctypes.c_void_p(address)
        call_on(self._index, "cuMemHostRegister_v2", at, ctypes.c_size_t(num_bytes), _REGISTER_FLAGS)
        call_on(self._index, "cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), at, 0)
        return pointer.value

    def unregister(self, address: int) -> None:
        """Undo `register`; the device must be through with the memory."""
        call_on(self._index, "cuMemHostUnregister", ctypes.c_void_p(address))

    def allow_queries_while_capturing(self) -> None:
        """Let this thread ask for events while another thread captures a graph, which would fail otherwise."""
        with suppress(DriverError):
            call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))

    def write_words(self, stream: Any, words: Mapping[int, int]) -> None:
        """Have a stream write 64-bit words, after all of its work so far, whose writes are seen before them.

        Args:
            stream: The stream.
            words: The value of each word, by its address on the device.

        Raises:
            DriverError: The driver does not take it.
        """
        self._issue(stream, _WRITE, words)

    def wait_for_words(self, stream: Any, words: Mapping[int, int]) -> None:
        """Have a stream wait until each 64-bit word is at least its value, before all of its later work; see `write_words`."""
        self._issue(stream, _WAIT, words)

    def _issue(self, stream: Any, operation: int, words: Mapping[int, int]) -> None:
        operations = [_WordOperation(operation, address, value, _DEFAULT) for address, value in words.items()]
        for first in range(0, len(operations), _MAX_OPERATIONS):
            batch = operations[first : first + _MAX_OPERATIONS]
            array = (_WordOperation * len(batch))(*batch)
            call_on(self._index, "cuStreamBatchMemOp_v2", ctypes.c_void_p(stream.cuda_stream), len(batch), array, 0)
