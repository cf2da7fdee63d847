"""An accelerator of host memory with a device type of its own, ``fake``, to run the real `AcceleratorRuntime` where there is none.

It is torch's PrivateUse1 with kernels in Python. A tensor is known by its device: torch itself refuses to mix it with CPU
tensors. Every operation is queued to the calling thread's stream, the default one included, and done later by `FakeGpu`; only what
needs a value (a blocking copy, ``item``) makes the host wait. Unlike in `fake_cuda`, streams, events and devices are those that
`torch.get_device_module` gives, as on a real accelerator.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from fake_cuda import FakeEvent, FakeGpu, FakeStream
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "fake"
_EXTENSION, _CPU = 12, 1  # DLDeviceType of dlpack.h
# They have no work to do on a stream.
_WITHOUT_VALUE = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
_NEEDS_VALUE = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")

ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_local = threading.local()


def _as(tensor: torch.Tensor, device_type: int) -> torch.Tensor:
    """The same memory as a tensor of another device type."""
    capsule = torch._C._to_dlpack(tensor)
    # DLTensor begins with the pointer to its data, then the type and the number of its device.
    address = ctypes.pythonapi.PyCapsule_GetPointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + 8).value = device_type
    ctypes.c_int32.from_address(address + 12).value = 0
    return torch._C._from_dlpack(capsule)


def _raw(value: Any) -> Any:
    return _as(value, _CPU) if value.device.type == NAME else value


def current() -> FakeStream:
    """The calling thread's stream."""
    return getattr(_local, "stream", None) or FakeModule.default


class FakeModule(SimpleNamespace):
    """What ``torch.cuda`` is for CUDA."""

    gpu: FakeGpu
    default: FakeStream

    def Stream(self, device: torch.device) -> FakeStream:
        assert device == torch.device(NAME, 0)
        return FakeStream(self.gpu)

    def Event(self) -> FakeEvent:
        return FakeEvent(self.gpu, [0, 0])

    def current_stream(self, device: Any = None) -> FakeStream:
        return current()

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, _local.stream = getattr(_local, "stream", None), stream
        try:
            yield
        finally:
            _local.stream = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device.index == 0
        yield

    def synchronize(self, device: Any = None) -> None:
        for stream in self.gpu.streams:
            stream.synchronize()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

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
    """Any operation on tensors of the device."""
    name, stream = op._schema.name, current()
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    strangers = [leaf for leaf in leaves if leaf.device.type != NAME and leaf.dim() > 0]
    if strangers and leaves:
        raise RuntimeError(f"{name}: expected all tensors to be on the device {NAME}, got {strangers[0].device} too")
    raw_args, raw_kwargs = tree_map_only(torch.Tensor, _raw, (args, kwargs))
    if raw_kwargs.get("device") is not None:
        raw_kwargs["device"] = torch.device("cpu")
    if name in _NEEDS_VALUE:
        stream.synchronize()
        return tree_map_only(torch.Tensor, lambda t: _as(t, _EXTENSION), op(*raw_args, **raw_kwargs))
    written = [arg.alias_info is not None and arg.alias_info.is_write for arg in op._schema.arguments]
    if any(written):
        _later(stream, lambda: op(*raw_args, **raw_kwargs))
        index = written.index(True)
        given = args[index] if index < len(args) else kwargs[op._schema.arguments[index].name]
        return given if op._schema.returns else None
    result = op(*raw_args, **raw_kwargs)
    is_view = any(value.alias_info is not None for value in op._schema.returns)
    if leaves and not is_view and name not in _WITHOUT_VALUE:
        for one in [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]:
            if one.dtype != torch.bool and one.numel() and one.is_contiguous():
                one.view(-1).view(torch.uint8).fill_(0x5A)

        def fill() -> None:
            again = op(*raw_args, **raw_kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        _later(stream, fill)
    return tree_map_only(torch.Tensor, lambda t: _as(t, _EXTENSION), result)


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between the device and the host, or on the device."""
    stream, raw_source, raw_target = current(), _raw(source), _raw(target)
    _later(stream, lambda: raw_target.copy_(raw_source))
    if not non_blocking and source.device != target.device:
        stream.synchronize()
    return target


_library: list[torch.library.Library] = []


def install(seed: int) -> None:
    """Make the device in this process, once."""
    from torch.utils import backend_registration

    from ray_fracbackend.ipc.device import runtime as device_runtime
    from ray_fracbackend.ipc.device import side as device_side
    from ray_fracbackend.ipc.group import collective_group

    FakeModule.gpu = FakeGpu(seed)
    FakeModule.default = FakeStream(FakeModule.gpu)
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
            pass

        def new_future(self) -> torch.futures.Future[Any]:
            return torch.futures.Future()

        def complete(self, future: torch.futures.Future[Any], value: Any, stream: Any) -> None:
            event = self.new_event()
            event.record(stream)

            def finish() -> None:
                FakeModule.gpu.wait_until(event.query)
                future.set_result(value)

            threading.Thread(target=finish, daemon=True).start()

    device_runtime.AcceleratorRuntime = Runtime  # type: ignore[misc]
    collective_group.AcceleratorRuntime = Runtime  # type: ignore[misc]
    assert device_side.runtime is device_runtime
