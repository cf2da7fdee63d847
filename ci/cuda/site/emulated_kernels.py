"""CPU kernels for torch's CUDA operators, on the memory of the emulated runtime (ci/cuda/rig.hpp).

Runs in every process that imports a CUDA build of torch under ci/cuda.py, on the thread that calls an operator and on
the threads of the streams. Each aten operator with a CUDA kernel that a CPU kernel can replace gets a Python kernel,
which

1. computes the shapes of the outputs on meta tensors, and allocates them with torch's caching allocator;
2. puts the computation into the queue of the current stream. It runs late, on the stream's thread, and finds its
operands only by their addresses. It holds no reference: memory that is freed too early is reused, as on a GPU.

Operators whose output shape depends on data wait for the stream, as CUDA's do; so do operators without a meta kernel.
Operators that only call the runtime stay torch's own: views, item(), record_stream, copies that are one
cudaMemcpyAsync. It is stricter than a GPU: new memory is filled with 0xFF bytes in the order of the stream, and a
kernel that fails ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_formulas import FORMULAS, RANDOM
from torch._C import DispatchKey, DispatchKeySet

_CPU = torch.device("cpu")
_META = torch.device("meta")
# Dispatch keys of torch's code for all devices, if an operator has such code.
_GENERIC = DispatchKeySet(DispatchKey.CPU)
# Operators whose own CUDA kernel calls only the runtime, or nothing.
_NATIVE = {
    "_efficientzerotensor",
    "_fused_sdp_choice",
    "_local_scalar_dense",
    "_pin_memory",
    "is_pinned",
    "is_set_to",
    "record_stream",
    "resize_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
}
# Operators with the same code for all devices, which calls kernels of the device itself.
_GENERIC_CODE = ("convolution", "convolution_backward", "ldexp.Tensor", "ldexp.out", "ldexp_")
# Operators that accept operands from the host besides scalars.
_HOST_OPERANDS = ("index.", "_index_put_impl_", "_ctc_loss")
_ONLY_WRITES = {"copy_", "fill_.Scalar", "fill_.Tensor", "zero_"}
# Operators whose floating-point arguments affect shapes.
_RANGES = ("arange", "range", "linspace", "logspace")
# Error messages of CPU kernels for a type that they do not support.
_UNSUPPORTED = ("not implemented for", "support tensors of type")
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_PLANS = 1000  # remembered plans per operator
_TRIAL = 1 << 22  # maximum number of elements of the operands in a trial
_MISSING = object()
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)

# ---- the runtime
# Calls that return at once keep the GIL; calls that wait release it.
_rig = ctypes.PyDLL(None)
_waits = ctypes.CDLL(None)
_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_queued: dict[int, tuple[str, Callable[[], None]]] = {}
_numbers = itertools.count(1)


def _declare() -> None:
    for name in ("rig_launch", "rig_enqueue"):
        getattr(_rig, name).argtypes = [ctypes.c_void_p, _Work, ctypes.c_void_p]
        getattr(_rig, name).restype = None
    _rig.rig_address.argtypes = [ctypes.c_void_p]
    _rig.rig_address.restype = ctypes.c_void_p
    _rig.rig_abort.argtypes = [ctypes.c_char_p]
    _rig.rig_poison.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _rig.rig_poison.restype = None
    _rig.rig_count_bytes.argtypes = [ctypes.c_uint64]
    _rig.rig_count_bytes.restype = None
    _waits.rig_synchronize.argtypes = [ctypes.c_void_p]
    _waits.rig_synchronize.restype = None


@_Work
def _run(number: int) -> None:
    """Run a queued computation on the stream's thread."""
    name, work = _queued[number]
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            work()
    except BaseException:
        print(f"kernel of aten::{name} failed:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        _rig.rig_abort(f"kernel of aten::{name} failed".encode())
    finally:
        del _queued[number], work


def _put(enqueue: Any, stream: int, name: str, work: Callable[[], None]) -> None:
    number = next(_numbers)
    _queued[number] = name, work
    enqueue(stream, _run, number)
    _check()


def _check() -> None:
    """Raise torch's error for a lost device: no queued computation will run."""
    if _rig.cudaPeekAtLastError():
        torch.cuda.synchronize()


def _drain() -> None:
    """Let queued computations finish before the interpreter ends; abandon a stream that waits forever."""
    limit = time.monotonic() + 5
    while _queued and time.monotonic() < limit and not _rig.cudaPeekAtLastError():
        time.sleep(0.001)


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[int]:
    """Make the device current, as torch's own kernels do, and yield its current stream."""
    before = torch._C._cuda_exchangeDevice(device.index)
    try:
        yield torch._C._cuda_getCurrentRawStream(device.index)
    finally:
        torch._C._cuda_exchangeDevice(before)


# ---- memory
class _Region:
    """Device memory of a tensor, without the tensor."""

    __slots__ = ("bytes", "conj", "dtype", "neg", "pointer", "size", "stride", "touched")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()
        self.pointer, self.bytes, self.touched = 0, 0, 0
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
            self.pointer, self.bytes = tensor.data_ptr(), (last + 1) * tensor.element_size()
            # Memory that a kernel reads: without the gaps between rows and without the repetitions of a dimension.
            sizes = [size for size, stride in zip(self.size, self.stride, strict=True) if stride]
            self.touched = min(self.bytes, math.prod(sizes) * tensor.element_size())

    def tensor(self) -> torch.Tensor:
        """Return a CPU tensor over the same memory; end the process if the memory has been freed."""
        if not self.bytes:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        address = _rig.rig_address(self.pointer)
        storage = torch._C._construct_storage_from_data_pointer(address, _CPU, self.bytes)
        tensor = torch.empty(0, dtype=self.dtype).set_(storage, 0, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor


def _poison(pointer: int, size: int, stream: int) -> None:
    """Fill new memory late. This also detects memory that another stream still reads."""
    if size:
        _rig.rig_poison(stream, pointer, size)
        _check()


def _allocate(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor with the layout of a meta tensor in new memory. It replaces torch's own kernel."""
    size = like.untyped_storage().nbytes()
    with _current(device) as stream:
        storage = torch.UntypedStorage(size, device=device)
        _poison(storage.data_ptr(), size, stream)
    layout = {"size": like.size(), "stride": like.stride(), "dtype": like.dtype, "storage_offset": 0}
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(layout, storage)


def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the kernel of torch.empty or torch.empty_strided."""

    def kernel(
        *shape: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, **options: Any
    ) -> Any:
        if pin_memory:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        with torch._C.DisableTorchFunction():
            options = {name: value for name, value in options.items() if value is not None}
            return _allocate(make(*shape, dtype=dtype, device=_META, **options), _with_index(device))

    return kernel


def _resize_storage(storage: Any, size: int) -> Any:
    """UntypedStorage.resize_, with poison in the new part, because FSDP allocates its parameters in this way."""
    before = storage.nbytes()
    torch._C.StorageBase.resize_(storage, size)
    if storage.device.type == "cuda" and size > before:
        with _current(storage.device) as stream:
            _poison(storage.data_ptr() + before, size - before, stream)
    return storage


# ---- operands
def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _with_index(device: Any) -> torch.device:
    if not isinstance(device, torch.device) or device.index is None:
        return torch.device("cuda", torch._C._cuda_getDevice())
    return device


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to each value of a list."""
    return [_each(function, each) for each in value] if isinstance(value, (list, tuple)) else function(value)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _number(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, (bool, int, float, complex)) else value


def _held(value: Any) -> Any:
    """Return what a queued computation keeps of an argument: addresses of device memory, values of host memory."""
    if isinstance(value, torch.Tensor):
        return _Region(value) if value.is_cuda else value.clone()
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return None if isinstance(value, torch.Generator) else value


def _mapped(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Region) else value


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
        meta = meta.conj() if value.is_conj() else meta
        return torch._neg_view(meta) if value.is_neg() else meta
    if isinstance(value, torch.device):
        return _META
    return None if isinstance(value, torch.Generator) else value


def _sample(value: Any) -> Any:
    """Return a trial value for an argument: ones, but zeros for indices; LAPACK's int32 indices start at 1."""
    if isinstance(value, torch.Tensor):
        index = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.int32
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).fill_(0 if index else 1)
    return _held(value)


# ---- kernels
class _Kernel:
    """Kernel of one operator. Its arguments are a list in schema order, with _MISSING for omitted ones."""

    def __init__(self, name: str, schema: Any) -> None:
        arguments = schema.arguments
        self.name = name
        self.names = [each.name for each in arguments]
        self.positional = sum(not each.kwarg_only for each in arguments)
        self.written = {i: each for i, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write}
        self.outs = [i for i, each in self.written.items() if each.is_out]
        self.returned = [self._returned(each) for each in schema.returns]
        self.generator = next((i for i, each in enumerate(arguments) if "Generator" in str(each.type)), None)
        # Numbers may replace tensors only where torch's Python interface accepts them; most aten operators do not.
        takes_numbers = torch._C._should_allow_numbers_as_tensors(name.partition(".")[0])
        self.numbers = [i for i, each in enumerate(arguments) if str(each.type) == "Tensor" and not takes_numbers]
        self.waits = any("Tensor" not in str(each.type) for each in schema.returns)
        self.floats = name.partition(".")[0] in _RANGES
        self.plans: dict[Any, Any] = {}
        self._operator: Any = None

    def _returned(self, result: Any) -> int | None:
        """Return the argument that is returned, None for a new tensor."""
        alias = result.alias_info
        return next(
            (i for i, each in self.written.items() if alias and each.alias_info.before_set == alias.before_set), None
        )

    @property
    def operator(self) -> Any:
        """The operator that computes it on meta tensors and on CPU tensors."""
        if self._operator is None:
            packet, _, overload = self.name.partition(".")
            self._operator = FORMULAS.get(self.name) or getattr(getattr(torch.ops.aten, packet), overload or "default")
        return self._operator

    def _call(self, values: list[Any]) -> Any:
        count = next((i for i in range(self.positional) if values[i] is _MISSING), self.positional)
        named = zip(self.names[count:], values[count:], strict=True)
        return self.operator(*values[:count], **{name: value for name, value in named if value is not _MISSING})

    def _results(self, result: Any) -> Any:
        return (result,) if len(self.returned) == 1 else result or ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Issue the kernel on the calling thread, for the current stream."""
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowADInplaceOrView():
            values = [*args, *(kwargs.get(name, _MISSING) for name in self.names[len(args) :])]
            for at in self.numbers:
                values[at] = _number(values[at])
            device = self._device(values)
            if device is None:  # tensors of several devices: torch's own code processes them one by one
                return self.operator.redispatch(_GENERIC, *args, **kwargs)
            with _current(device) as stream:
                plan = None if self.waits else self._plan(values)
                seed = self._seed(values, device)
                if plan is None:
                    return self._wait(values, device, stream, seed)
                return self._queue(plan, values, device, stream, seed)

    def _device(self, values: list[Any]) -> torch.device | None:
        """Return the device of the operands, checked as torch does; None for a foreach operator on several devices."""
        tensors = [each for each in _flat(values) if isinstance(each, torch.Tensor)]
        devices = {each.device for each in tensors if each.is_cuda or each.dim()}
        written = _flat(values[at] for at in self.written)
        if len(devices) > 1 or any(isinstance(each, torch.Tensor) and not each.is_cuda for each in written):
            if self.name.startswith("_foreach_"):
                return None
            if len(devices) > 2 or not tensors[0].is_cuda or not self.name.startswith(_HOST_OPERANDS):
                found = " and ".join(sorted({str(each.device) for each in tensors}, reverse=True)[:2])
                message = f"Expected all tensors to be on the same device, but found at least two devices, {found}!"
                raise RuntimeError(message)
        given = [each for each in values if isinstance(each, torch.device)]  # of torch.tril_indices and others
        return next((each for each in devices if each.type == "cuda"), None) or _with_index(given[0] if given else None)

    def _seed(self, values: list[Any], device: torch.device) -> int | None:
        """Return a random operator's seed from the state of its CUDA generator, and advance the state."""
        if self.generator is None and self.name not in RANDOM:
            return None
        generator = None if self.generator is None else values[self.generator]
        if not isinstance(generator, torch.Generator):
            generator = torch.cuda.default_generators[device.index]
        if generator.device.type != "cuda":
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        return (generator.initial_seed() * 0x9E3779B97F4A7C15 + offset) % (1 << 63)

    # ---- what is known before it runs
    def _plan(self, values: list[Any]) -> Any:
        """Return layouts of the outputs, and of resized out= arguments; None if they depend on data."""
        key = tuple(map(self._key, values))
        plan = self.plans.get(key, _MISSING)
        if plan is not _MISSING:
            return plan
        if len(self.plans) >= _PLANS:
            self.plans.clear()
        try:
            plan = self._layouts(values)
            if plan is not None and not self._try(plan[0], values):
                plan = None
        except _ERRORS:
            return None  # the CPU kernel raises the error, or supports the case
        self.plans[key] = plan
        return plan

    def _key(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.size(), value.stride(), value.is_conj(), value.is_neg()
        if isinstance(value, (list, tuple)):
            return tuple(map(self._key, value))
        if isinstance(value, float) and not self.floats:
            return float
        return None if isinstance(value, torch.Generator) else (type(value), value)

    def _layouts(self, values: list[Any]) -> Any:
        metas = _each(_meta, values)
        try:
            results = self._results(self._call(metas))
        except NotImplementedError:  # no meta kernel; none is needed if the results are arguments
            return None if self.outs or None in self.returned else ([None] * len(self.returned), [])
        outputs = [value if at is None else None for at, value in zip(self.returned, results, strict=True)]
        outs = zip(_flat(values[at] for at in self.outs), _flat(metas[at] for at in self.outs), strict=True)
        return outputs, [meta if out.size() != meta.size() else None for out, meta in outs]

    def _try(self, outputs: list[Any], values: list[Any]) -> bool:
        """Compute on other data of the same layout, so that the caller detects wrong arguments, not the stream."""
        if sum(each.numel() for each in _flat(values) if _is_cuda(each)) > _TRIAL:
            return True
        seed = None if self.generator is None and self.name not in RANDOM else 0
        try:
            results = self._results(self._compute(_each(_sample, values), seed))
        except RuntimeError as error:
            if "ZeroDivisionError" in str(error):
                return True
            raise
        pairs = zip(_flat(outputs), _flat(results), strict=False)
        return all(meta is None or not value.numel() or meta.size() == value.size() for meta, value in pairs)

    # ---- running it
    def _compute(self, held: list[Any], seed: int | None) -> Any:
        """Compute on CPU tensors, on the stream's thread."""
        values = _each(_mapped, held)
        if seed is not None and self.generator is not None:
            values[self.generator] = torch.Generator().manual_seed(seed)
        elif seed is not None:
            return self.operator(*values, generator=torch.Generator().manual_seed(seed))
        try:
            return self._call(values)
        except RuntimeError as error:
            if not any(words in str(error) for words in _UNSUPPORTED):
                raise
            return self._compute_wider(values, error)

    def _compute_wider(self, values: list[Any], error: RuntimeError) -> Any:
        """Compute in a wider type, because CPU kernels do not support some narrow types."""
        pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def widen(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return _WIDER.get(value, value)
            if not isinstance(value, torch.Tensor) or value.dtype not in _WIDER:
                return value
            pairs[id(value)] = value, value.to(_WIDER[value.dtype])
            return pairs[id(value)][1]

        wide = _each(widen, values)
        if not pairs:
            raise error
        result = self._call(wide)
        for value in _flat(values[at] for at in self.written):
            if id(value) in pairs:
                value.copy_(pairs[id(value)][1])
        return result

    def _queue(self, plan: Any, values: list[Any], device: torch.device, stream: int, seed: int | None) -> Any:
        outputs, resized = plan
        for out, meta in zip(_flat(values[at] for at in self.outs), resized, strict=True):
            if meta is not None:
                out.resize_(meta.size()).as_strided_(meta.size(), meta.stride())
        fresh = _each(lambda meta: None if meta is None else _allocate(meta, device), outputs)
        targets = _each(lambda tensor: None if tensor is None else _Region(tensor), fresh)
        held = _each(_held, values)

        def work() -> None:
            results = self._results(self._compute(held, seed))
            for target, value in zip(_flat(targets), _flat(results), strict=True):
                if target is not None and value.numel():  # some CPU kernels omit results that backward does not need
                    target.tensor().copy_(value)

        # A tensor that is changed in place is read and written.
        changed = [] if self.name in _ONLY_WRITES else [held[at] for at in self.written if at not in self.outs]
        operands = _flat([*targets, *held, *changed])
        _rig.rig_count_bytes(sum(each.touched for each in operands if isinstance(each, _Region)))
        _put(_rig.rig_launch, stream, self.name, work)
        return self._pack(fresh, values)

    def _pack(self, fresh: list[Any], values: list[Any]) -> Any:
        pairs = zip(self.returned, fresh, strict=True)
        results = [value if at is None else values[at] for at, value in pairs]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    def _wait(self, values: list[Any], device: torch.device, stream: int, seed: int | None) -> Any:
        """Compute in the order of the stream, wait, and then allocate the outputs."""
        held = _each(_held, values)
        outs = [at for at in self.outs if isinstance(values[at], torch.Tensor)]
        for at in outs:
            held[at] = torch.empty(0, dtype=values[at].dtype)
        done: list[Any] = []

        def work() -> None:
            try:
                done.append(self._compute(held, seed))
            except Exception as error:
                done.append(error)

        _put(_rig.rig_launch, stream, self.name, work)
        _waits.rig_synchronize(stream)
        _check()
        (result,) = done
        if isinstance(result, Exception):
            raise result
        for at in outs:
            _store(held[at], values[at].resize_(held[at].size()), stream)

        def up(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.layout != torch.strided:
                raise NotImplementedError(f"aten::{self.name}: sparse tensors have no emulated kernels")
            return _store(value, _allocate(_meta(value), device), stream)

        pairs = zip(self.returned, self._results(result), strict=True)
        return self._pack([_each(up, value) if at is None else None for at, value in pairs], values)


def _store(value: torch.Tensor, tensor: torch.Tensor, stream: int) -> torch.Tensor:
    """Copy a computed value into a device tensor, after the allocation's poison."""
    region = _Region(tensor)
    _put(_rig.rig_enqueue, stream, "copy_", lambda: region.tensor().copy_(value))
    return tensor


def _copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """copy_: on one device torch's own calls cudaMemcpyAsync, or fails because a kernel is needed."""
    with torch._C.DisableTorchFunction():
        alike = (self.dtype, self.size(), self.is_conj(), self.is_neg()) == (
            source.dtype,
            source.size(),
            source.is_conj(),
            source.is_neg(),
        )
        plain = alike and self.is_contiguous() and source.is_contiguous()
        if plain or not (self.is_cuda and source.is_cuda) or self is source or not self.numel():
            return torch.ops.aten.copy_.default.redispatch(_GENERIC, self, source, non_blocking)
        if self.device != source.device:
            staged = torch.empty(self.size(), dtype=self.dtype, device=self.device)
            staged.copy_(
                source.to(self.dtype).expand(self.size()).resolve_conj().resolve_neg().contiguous(), non_blocking
            )
            source = staged
        return _LATE_COPY(self, source, non_blocking)


def _sleep(cycles: int) -> None:
    """torch.cuda._sleep, at 2 GHz."""
    with _current(_with_index(None)) as stream:
        _put(_rig.rig_launch, stream, "_sleep", lambda: time.sleep(cycles / 2e9))


# ---- registration
_LATE_COPY = _Kernel("copy_", torch._C._get_schema("aten::copy_", ""))
_library: Any = None  # keeps the kernels registered


def _replaceable() -> Iterator[tuple[str, Any]]:
    """Return the operators that get a kernel here, with their schemas."""
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if name == full or name in _NATIVE:
            continue
        key = "CompositeExplicitAutograd" if name in _GENERIC_CODE else "CUDA"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
            continue
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, "CPU") and name not in FORMULAS:
            continue
        packet, _, overload = full.partition(".")
        schema = torch._C._get_schema(packet, overload)
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.arguments)
        if not views:
            yield name, schema


def install() -> None:
    """Register the kernels, and disable features without a kernel here: cuDNN and fused attention."""
    global _library
    _declare()
    _library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Any] = {name: _Kernel(name, schema) for name, schema in _replaceable()}
    kernels["copy_"] = _copy
    kernels["empty.memory_format"] = _factory(torch.empty)
    kernels["empty_strided"] = _factory(torch.empty_strided)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each kernel replaces one of torch's
        for name, kernel in kernels.items():
            _library.impl(name, kernel, "CUDA")
    torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign,assignment]
    torch.cuda._sleep = _sleep
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    atexit.register(_drain)
    os.register_at_fork(after_in_child=_queued.clear)
