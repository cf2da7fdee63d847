"""Device memory that other processes can map: the CUDA driver's own calls. Imports stdlib and torch.

torch can share storages too, but its way leaves a counter file in /dev/shm when a process is killed, keeps freed memory
until all receivers let go, and depends on how the caching allocator is configured (expandable segments, cudaMallocAsync).
Memory from ``cuMemAlloc`` can always be exported.

Source: CUDA driver API, "Memory Management" (cuIpc*), "Primary Context Management" and "Stream Memory Operations".
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

import torch

from ..host.support import host_memory_support

# Smaller allocations may lie in a block with others, and a handle opens the whole block (cudaIpcGetMemHandle).
GRANULARITY_BYTES = 1 << 21
# Operations in one call of cuStreamBatchMemOp, which takes fewer than 256.
MAX_OPERATIONS = 255
# CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_HAS_64_BIT_STREAM_MEM_OPS = 122
_OUT_OF_MEMORY = 2


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class Handle(ctypes.Structure):
    """``CUipcMemHandle``: what another process needs to map memory."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class WordOperation(ctypes.Structure):
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
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), Handle, ctypes.c_uint]
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


def device_uuid(index: int) -> str:
    """Return the identity of a visible device, equal in all processes, of a MIG slice its own; makes no context.

    Raises:
        DriverError: The driver cannot be used.
    """
    raw = (ctypes.c_ubyte * 16)()
    call("cuDeviceGetUuid_v2", raw, _device(index))  # the first version names the parent of a slice
    return str(UUID(bytes=bytes(raw)))


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
