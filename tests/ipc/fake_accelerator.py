"""An accelerator in host memory with its own device type, ``fake``, to run the real `AcceleratorRuntime` without one.

It is torch's PrivateUse1 with kernels in Python. A tensor is identified by its device: torch itself refuses to mix it with CPU tensors.
Every operation is queued to the calling thread's stream, including the default stream, and executed later by `FakeGpu`. Only an operation
that needs a value (a blocking copy, ``item``) makes the host wait. Unlike in `fake_cuda`, streams, events and devices are those of
`torch.get_device_module`, as on a real accelerator. There are two devices. A thread starts on the first one, and using a device creates a
context there. The memory of a freed tensor is overwritten when its stream reaches that point, as with CUDA's allocator, which reuses it for
the next tensor of the stream.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from fake_cuda import FakeDriver, FakeEvent, FakeGpu, FakeStream
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "fake"
NUM_DEVICES = 2
_EXTENSION, _CPU = 12, 1  # DLDeviceType of dlpack.h
# They have no work on a stream.
_WITHOUT_VALUE = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
_NEEDS_VALUE = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")

ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_local = threading.local()


def _as(tensor: torch.Tensor, device_type: int, index: int = 0) -> torch.Tensor:
    """Return the same memory as a tensor of another device, which keeps it."""
    capsule = torch._C._to_dlpack(tensor)
    # DLTensor begins with the pointer to its data, then the type and the number of its device.
    address = ctypes.pythonapi.PyCapsule_GetPointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + 8).value = device_type
    ctypes.c_int32.from_address(address + 12).value = index
    return torch._C._from_dlpack(capsule)


def _raw(value: Any) -> Any:
    """Return a device tensor as a CPU tensor that, like a launched kernel, does not keep the memory."""
    if value.device.type != NAME:
        return value
    storage = value.untyped_storage()
    found = torch.empty(0, dtype=value.dtype)
    if storage.nbytes():
        whole = torch.frombuffer(
            (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8
        )
        found.set_(whole.untyped_storage(), value.storage_offset(), value.size(), value.stride())
    else:
        found = found.view(value.size())
    return found.conj() if value.is_conj() else found


class Allocator:
    """Memory of the devices, which lasts as long as the process: only the permission to write to it changes.

    The memory of a freed tensor is overwritten at the end of its own stream, and of streams that were recorded with it.
    """

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._users: dict[int, list[FakeStream]] = {}

    def like(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return new memory of a device with the form and content of a CPU tensor; the caller's stream owns it."""
        num_bytes = max(tensor.untyped_storage().nbytes(), 64)
        block = type("Block", (ctypes.c_ubyte * num_bytes,), {})()
        address, owner = ctypes.addressof(block), FakeModule.current_stream(torch.device(NAME, index))
        self._blocks.append(block)

        class View(ctypes.c_ubyte * num_bytes):  # type: ignore[misc]
            """Lives as long as the tensor."""

        view = View.from_address(address)
        weakref.finalize(view, self._left, address, num_bytes, owner).atexit = False
        whole = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        found = torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())
        found.copy_(tensor)
        return _as(found, _EXTENSION, index)

    def record(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """See ``Tensor.record_stream``."""
        self._users.setdefault(tensor.untyped_storage().data_ptr(), []).append(stream)

    def _left(self, address: int, num_bytes: int, owner: FakeStream) -> None:
        events = []
        for stream in self._users.pop(address, []):
            events.append(FakeEvent(FakeModule.gpu, [0, 0]))
            events[-1].record(stream)
        over = (ctypes.c_ubyte * num_bytes).from_address(address)
        owner.issue(lambda: ctypes.memset(over, 0xA5, num_bytes), lambda: all(event.query() for event in events))


class FakeModule(SimpleNamespace):
    """Counterpart of ``torch.cuda``. `install` sets the attributes."""

    gpu: FakeGpu
    defaults: list[FakeStream]
    allocator: Allocator
    # Devices that this process has used.
    contexts: set[int]

    def Stream(self, device: torch.device) -> FakeStream:
        self.contexts.add(device.index)
        stream = FakeStream(self.gpu)
        stream.index = device.index
        return stream

    def Event(self) -> FakeEvent:
        return FakeEvent(self.gpu, [0, 0])

    @classmethod
    def current_stream(cls, device: Any = None) -> FakeStream:
        index = cls.current_device() if device is None else device.index
        return getattr(_local, "streams", {}).get(index) or cls.defaults[index]

    @classmethod
    def _set_stream(cls, stream: FakeStream) -> None:
        # Like torch.cuda.set_stream, which also sets the device and thereby creates a context there.
        cls.contexts.add(stream.index)
        _local.index = stream.index
        _local.streams = {**getattr(_local, "streams", {}), stream.index: stream}

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, there = self.current_stream(), self.current_stream(torch.device(NAME, stream.index))
        self._set_stream(stream)
        try:
            yield
        finally:
            if before.index != stream.index:
                self._set_stream(there)
            self._set_stream(before)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, _local.index = self.current_device(), device.index
        try:
            yield
        finally:
            _local.index = before

    def synchronize(self, device: Any = None) -> None:
        for stream in self.gpu.streams:
            stream.synchronize()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def current_device() -> int:
        return getattr(_local, "index", 0)

    def device_count(self) -> int:
        return NUM_DEVICES

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


def _later(stream: FakeStream, function: Any) -> None:
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            function()

    stream.issue(run)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on tensors of the device."""
    name = op._schema.name
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    here = [leaf for leaf in leaves if leaf.device.type == NAME]
    strangers = [leaf for leaf in leaves if leaf.dim() > 0 and leaf.device != (here or leaves)[0].device]
    if strangers:
        raise RuntimeError(
            f"{name}: expected all tensors to be on one device, got {here[0].device} and {strangers[0].device}"
        )
    raw_args, raw_kwargs = tree_map_only(torch.Tensor, _raw, (args, kwargs))
    # A number in place of a tensor comes without its tensor, and not every operation accepts it.
    raw_args = tuple(
        torch.tensor(value) if isinstance(value, int | float | complex) and str(spec.type) == "Tensor" else value
        for value, spec in zip(raw_args, op._schema.arguments, strict=False)
    )
    wanted = raw_kwargs.get("device")
    index = here[0].device.index if here else FakeModule.current_device() if wanted is None else wanted.index or 0
    FakeModule.contexts.add(index)
    stream = FakeModule.current_stream(torch.device(NAME, index))
    if wanted is not None:
        raw_kwargs["device"] = torch.device("cpu")
    if name in _NEEDS_VALUE:
        stream.synchronize()
        return tree_map_only(torch.Tensor, lambda t: FakeModule.allocator.like(t, index), op(*raw_args, **raw_kwargs))
    written = [arg.alias_info is not None and arg.alias_info.is_write for arg in op._schema.arguments]
    if any(written):
        _later(stream, lambda: op(*raw_args, **raw_kwargs))
        position = written.index(True)
        given = args[position] if position < len(args) else kwargs[op._schema.arguments[position].name]
        return given if op._schema.returns else None
    if any(value.alias_info is not None for value in op._schema.returns):
        # A view keeps the memory of its base.
        return tree_map_only(
            torch.Tensor,
            lambda t: _as(t, _EXTENSION, index),
            op(*tree_map_only(torch.Tensor, _owning, args), **tree_map_only(torch.Tensor, _owning, kwargs)),
        )
    results = tree_map_only(torch.Tensor, lambda t: FakeModule.allocator.like(t, index), op(*raw_args, **raw_kwargs))
    if leaves and name not in _WITHOUT_VALUE:
        places = [_raw(leaf) for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        for place in places:
            if place.dtype != torch.bool and place.numel() and place.is_contiguous():
                place.view(-1).view(torch.uint8).fill_(0x5A)

        def fill() -> None:
            again = [leaf for leaf in tree_leaves(op(*raw_args, **raw_kwargs)) if isinstance(leaf, torch.Tensor)]
            for place, value in zip(places, again, strict=True):
                place.copy_(value)

        _later(stream, fill)
    return results


def _owning(value: torch.Tensor) -> torch.Tensor:
    return _as(value, _CPU) if value.device.type == NAME else value


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between the device and the host, or on the device."""
    device = source.device if source.device.type == NAME else target.device
    stream, raw_source, raw_target = FakeModule.current_stream(device), _raw(source), _raw(target)
    FakeModule.contexts.add(device.index)
    _later(stream, lambda: raw_target.copy_(raw_source))
    if not non_blocking and source.device != target.device:
        stream.synchronize()
    return target


_library: list[torch.library.Library] = []


def install(seed: int) -> None:
    """Create the device in this process, once."""
    from torch.utils import backend_registration

    from ray_fracbackend.ipc.device import runtime as device_runtime
    from ray_fracbackend.ipc.device import side as device_side
    from ray_fracbackend.ipc.group import collective_group

    FakeModule.gpu = FakeDriver.gpu = FakeGpu(seed)
    FakeModule.defaults = [FakeStream(FakeModule.gpu) for _ in range(NUM_DEVICES)]
    for index, stream in enumerate(FakeModule.defaults):
        stream.index = index
    FakeModule.allocator, FakeModule.contexts = Allocator(), set()
    backend_registration._setup_privateuseone_for_python_backend(NAME, FakeModule())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_kernel, "PrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_copy_from", _copy, "PrivateUse1")
    _library.extend([fallback, kernels])

    class Runtime(device_runtime.AcceleratorRuntime):
        """The parts of torch's C++ that PrivateUse1 lacks in Python: pinned memory, futures, the allocator's streams."""

        def pinned(self, num_bytes: int) -> torch.Tensor:
            return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

        def keep(self, tensor: torch.Tensor, stream: Any) -> None:
            FakeModule.allocator.record(tensor, stream)

        def new_future(self) -> torch.futures.Future[Any]:
            return torch.futures.Future()

        def complete(self, future: torch.futures.Future[Any], value: Any, stream: Any) -> None:
            event = self.new_event()
            event.record(stream)

            def finish() -> None:
                FakeModule.gpu.wait_until(event.query)
                future.set_result(value)

            threading.Thread(target=finish, daemon=True).start()

    class Cuda(FakeDriver, Runtime):
        """The additional parts of CUDA."""

        @staticmethod
        def owns(tensor: torch.Tensor) -> bool:
            return tensor.device.type == NAME

        def tensor_over(self, memory: torch.Tensor) -> torch.Tensor:
            return _as(memory, _EXTENSION, self.device.index)

    device_runtime.AcceleratorRuntime = Runtime  # type: ignore[misc]
    device_runtime.CudaRuntime = Cuda  # type: ignore[misc]
    collective_group.AcceleratorRuntime = Runtime  # type: ignore[misc]
    assert device_side.runtime is device_runtime
