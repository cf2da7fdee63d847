"""Device memory that other processes can map: the CUDA driver's own calls. Runs in every rank; imports stdlib and torch.

torch can share storages too, but its way leaves a counter file in /dev/shm when a process is killed, keeps freed memory
until all receivers let go, and depends on how the caching allocator is configured (expandable segments, cudaMallocAsync).
Memory from ``cuMemAlloc`` can always be exported. A tensor over it is made through DLPack.

Sources: CUDA driver API, "Memory Management" (cuIpc*) and "Primary Context Management"; dlpack.h 0.x (DLManagedTensor).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch.utils.dlpack

HANDLE_BYTES = 64
# Smaller allocations may lie in a block with others, and a handle opens the whole block (cudaIpcGetMemHandle).
GRANULARITY_BYTES = 1 << 21
# CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
_IPC_EVENTS_SUPPORTED = 125
_INVALID_VALUE = 1
_OUT_OF_MEMORY = 2
_LAZY_ENABLE_PEER_ACCESS = 1


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    except (OSError, AttributeError) as error:
        raise DriverError(f"the CUDA driver library cannot be used: {error}") from error
    return library


def _call(name: str, *args: Any) -> None:
    library = _library()
    code = getattr(library, name)(*args)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        message = f"{name}: {(text.value or str(code).encode()).decode()}"
        raise MemoryError(message) if code == _OUT_OF_MEMORY else DriverError(message)


def _device(index: int) -> ctypes.c_int:
    _call("cuInit", 0)
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), index)
    return device


def shares_events(index: int) -> bool:
    """Whether a visible device says that it can share events between processes; makes no context.

    Raises:
        DriverError: The driver cannot be used.
    """
    value, device = ctypes.c_int(1), _device(index)
    code = _library().cuDeviceGetAttribute(ctypes.byref(value), _IPC_EVENTS_SUPPORTED, device)
    # Older drivers do not know the question.
    return bool(value.value) or code == _INVALID_VALUE


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    # Kept for good: it is torch's own context, and releasing it early would free the memory in it.
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(index))
    return context


@contextmanager
def _current(index: int) -> Iterator[None]:
    """The calling thread may have no context yet, or that of another device."""
    _call("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@dataclass(frozen=True)
class DeviceBlock:
    """Device memory, one's own or another process's.

    Attributes:
        pointer: Address on the device, in this process.
        index: Device index in this process.
        imported: It belongs to another process.
        bytes: The memory as a uint8 tensor, 1-D; it must not be used once the block is released.
    """

    pointer: int
    index: int
    imported: bool
    bytes: torch.Tensor


def allocate(index: int, num_bytes: int) -> DeviceBlock:
    """Memory of this process, rounded up to 2 MiB.

    Raises:
        MemoryError: The device has not as much.
    """
    num_bytes = -(-num_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
    pointer = ctypes.c_uint64()
    with _current(index):
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
    return DeviceBlock(pointer.value, index, False, tensor_at(pointer.value, num_bytes, index))


def export_block(block: DeviceBlock) -> bytes:
    """What another process needs to map `block`."""
    handle = _Handle()
    with _current(block.index):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(block.pointer))
    return bytes(handle.reserved)


def open_block(index: int, handle: bytes, num_bytes: int) -> DeviceBlock:
    """Map another process's memory; `num_bytes` is what it asked for.

    Raises:
        DriverError: The driver does not let this process have it.
    """
    pointer = ctypes.c_uint64()
    with _current(index):
        _call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_ENABLE_PEER_ACCESS
        )
    return DeviceBlock(pointer.value, index, True, tensor_at(pointer.value, num_bytes, index))


def release(block: DeviceBlock) -> None:
    """Free or unmap. The device must be through with it; other processes must have unmapped what is freed."""
    name = "cuIpcCloseMemHandle" if block.imported else "cuMemFree_v2"
    with _current(block.index):
        _call(name, ctypes.c_uint64(block.pointer))


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_DL_CPU, _DL_CUDA = 1, 2
_DL_UINT = 1
# torch reads the structure again when the tensor goes, so these few bytes stay.
_descriptions: list[Any] = []


def tensor_at(pointer: int, num_bytes: int, index: int | None) -> torch.Tensor:
    """A uint8 tensor over memory that somebody else owns; `index` None means host memory."""
    shape = (ctypes.c_int64 * 1)(num_bytes)
    device = _DLDevice(_DL_CPU, 0) if index is None else _DLDevice(_DL_CUDA, index)
    managed = _DLManagedTensor(_DLTensor(pointer, device, 1, _DLDataType(_DL_UINT, 8, 1), shape, None, 0), None, None)
    _descriptions.append((managed, shape))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    with torch.inference_mode(False):
        return torch.utils.dlpack.from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))
