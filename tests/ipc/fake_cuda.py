"""A CUDA in host memory, to run the real device transport without a GPU.

Memory is real memory shared between real processes. A stream is a queue. Operations, event records and event waits that are issued to it
run later, in order, on a thread that selects randomly among the streams of the process and pauses. Events behave like CUDA's: a wait refers
to the latest record issued so far, and a wait for an event that was never recorded does nothing. Words of the host are written and waited
for in the order of the stream. An operation that would make the host wait for the device (reading a value) is an error while a stream is
current. Pinned memory belongs to the host: only non-blocking copies go between it and the device, and only the host's collectives use it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ray_fracbackend.ipc.device import driver, runtime
from ray_fracbackend.ipc.device import setup as device_setup
from ray_fracbackend.ipc.device import side as device_side
from ray_fracbackend.ipc.device.driver import DeviceBlock, DriverError
from ray_fracbackend.ipc.group import collective_group
from ray_fracbackend.ipc.host.arena import Arena, ArenaName, attach_arena, create_arena

# Environment variables of a rank: FAKE_CUDA_SEED (of its device; without it there is none), FAKE_CUDA_UUID, FAKE_CUDA_FREE (free bytes of
# the device; torch's cache has as many), FAKE_CUDA_BROKEN (what does not work, by name), FAKE_CUDA_STEP_S (seconds for a step of the
# set-up), FAKE_CUDA_ASYNC (the caller also has a stream, so nothing blocks the host).
# Longest pause after an operation, in seconds; one operation in five has one.
PAUSE_S = 0.002
_DATA_OFFSET = 4096
_WAIT_LIMIT_S = 60.0


class FakeGpu:
    """The device of this process: executes the operations in its streams."""

    def __init__(self, seed: int) -> None:
        self.streams: list[FakeStream] = []
        self.running = threading.Event()
        self.running.set()
        self.error: BaseException | None = None
        self.pause_s = PAUSE_S
        # Probability of continuing with the same stream as long as possible.
        self.stickiness = 0.0
        self._rng = random.Random(seed)
        self.work = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fake gpu", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop working; a device that continues would slow down the process's next work."""
        self._closed = True
        self.running.set()
        self._thread.join()

    def _run(self) -> None:
        stream: FakeStream | None = None
        while not self._closed:
            self.running.wait()
            with self.work:
                ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
                if not ready:
                    self.work.wait(0.0005)
                    continue
            if stream not in ready or self._rng.random() >= self.stickiness:
                stream = self._rng.choice(ready)
            try:
                stream.queue[0][1]()
            except BaseException as error:
                traceback.print_exc(file=sys.stderr)
                self.error = error
            with self.work:
                stream.queue.popleft()
                self.work.notify_all()
            if self.pause_s and self._rng.random() < 0.2:
                time.sleep(self._rng.random() * self.pause_s)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Block the host, which a test may do but the backend must not."""
        end = time.monotonic() + _WAIT_LIMIT_S
        with self.work:
            while not condition():
                if self.error is not None:
                    raise RuntimeError("the fake device failed") from self.error
                if time.monotonic() > end:
                    raise RuntimeError("the fake device is stuck")
                self.work.wait(0.0005)


def always() -> bool:
    """Most operations can run when it is their turn."""
    return True


class FakeStream:
    """A queue of operations to run later, in order."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        gpu.streams.append(self)

    def issue(self, run: Callable[[], None], ready: Callable[[], bool] = always) -> None:
        """Append an operation that may start when ``ready()`` returns True."""
        with self.gpu.work:
            self.queue.append((ready, run))
            self.gpu.work.notify_all()

    def wait_event(self, event: FakeEvent) -> None:
        """Make later operations wait for the latest record of `event` so far."""
        bound = event.words[0]
        self.issue(lambda: None, lambda: event.words[1] >= bound)

    def query(self) -> bool:
        return not self.queue

    def synchronize(self) -> None:
        self.gpu.wait_until(self.query)


class HostStream(FakeStream):
    """The stream of code without a current stream: it runs at once, so it must block where others queue."""

    def issue(self, run: Callable[[], None], ready: Callable[[], bool] = always) -> None:
        """Run it now."""
        self.gpu.wait_until(ready)
        run()


class FakeEvent:
    """An event; ``words`` are the numbers of the latest issued record and of the latest completed one."""

    def __init__(self, gpu: FakeGpu, words: Any) -> None:
        self.gpu = gpu
        self.words = words

    def record(self, stream: FakeStream) -> None:
        number = self.words[0] + 1
        self.words[0] = number

        def done() -> None:
            self.words[1] = number

        stream.issue(done)

    def query(self) -> bool:
        return bool(self.words[1] >= self.words[0])


class _Defer(TorchDispatchMode):
    """Send operations to a stream. Views are created at once; a result with its own memory is filled later."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"):
            raise AssertionError(f"{name} makes the host wait for the device")
        _check_places(name, [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)], args, kwargs)
        aliases = [value.alias_info for value in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return func(*args, **kwargs)
        inference = torch.is_inference_mode_enabled()

        def later(function: Callable[[], Any]) -> None:
            def run() -> None:
                with torch.inference_mode(inference), torch.no_grad():
                    function()

            self.stream.issue(run)

        if any(alias is not None for alias in aliases):
            later(lambda: func(*args, **kwargs))
            index = next(i for i, value in enumerate(func._schema.arguments) if value.alias_info is not None)
            return args[index] if index < len(args) else kwargs[func._schema.arguments[index].name]
        result = func(*args, **kwargs)
        if any(isinstance(arg, torch.Tensor) for arg in args) or name == "aten::cat":
            if result.dtype != torch.bool:
                result.view(-1).view(torch.uint8).fill_(0x5A)
            later(lambda: result.copy_(func(*args, **kwargs)))
        return result


def _check_places(name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> None:
    """Refuse what a real device refuses, or what would make the host wait for it."""
    on_host = [is_pinned(tensor) for tensor in tensors]
    if not any(on_host) or name in ("aten::slice.Tensor", "aten::slice", "aten::view", "aten::alias", "aten::detach"):
        return
    if name != "aten::copy_" or all(on_host):
        raise RuntimeError(f"{name}: expected all tensors to be on the fake device")
    if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
        raise AssertionError("a copy between host and device makes the host wait for the device")


# Pinned memory by address. As torch's allocator does, it is kept, and used again once no tensor and no issued copy refers to it.
_pinned: dict[int, bytearray] = {}
_pinned_lock = threading.Lock()


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in _pinned


class OnHost:
    """The host's collectives, which run beside the device: at once, and only on pinned memory."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.rank, self.num_ranks = host.rank, host.num_ranks

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._host, name)

        def call(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            tensors += [one for arg in args if isinstance(arg, list) for one in arg if one is not None]
            assert all(map(is_pinned, tensors)), f"{name} of the host got a tensor of the device"
            with _disable_current_modes():
                return method(*args)

        return call


_local = threading.local()


def _stack() -> list[FakeStream]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


class FakeCuda:
    """Has the methods of `driver.CudaRuntime`."""

    gpu: FakeGpu

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = (FakeStream if "FAKE_CUDA_ASYNC" in os.environ else HostStream)(self.gpu)

    @staticmethod
    def owns(tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def pinned(self, num_bytes: int) -> torch.Tensor:
        num_bytes = 1 << (num_bytes - 1).bit_length()
        with _disable_current_modes(), _pinned_lock:
            # The dictionary refers to it, the generator and the call.
            unused = (
                memory for memory in _pinned.values() if len(memory) == num_bytes and sys.getrefcount(memory) == 3
            )
            memory = next(unused, None) or bytearray(num_bytes)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
            _pinned[buffer.data_ptr()] = memory
            return buffer.fill_(0x5A)

    def synchronize(self) -> None:
        for stream in self.gpu.streams:
            stream.synchronize()

    def new_stream(self) -> FakeStream:
        return FakeStream(self.gpu)

    def current_stream(self) -> FakeStream:
        return _stack()[-1] if _stack() else self._host

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        _stack().append(stream)
        try:
            with _Defer(stream):
                yield
        finally:
            _stack().pop()

    def is_capturing(self) -> bool:
        return False

    def new_event(self) -> FakeEvent:
        return FakeEvent(self.gpu, [0, 0])

    def keep(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        pass

    def new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def complete(self, future: torch.futures.Future[Any], value: Any, stream: FakeStream) -> None:
        event = self.new_event()
        event.record(stream)

        def finish() -> None:
            self.gpu.wait_until(event.query)
            future.set_result(value)

        # A CUDA future completes at once, and its reader's stream waits; here the reader is the host.
        threading.Thread(target=finish, daemon=True).start()

    # Memory that real processes share, and words of the host.

    @property
    def broken(self) -> str:
        return os.environ.get("FAKE_CUDA_BROKEN", "")

    def missing(self) -> str | None:
        return "the fake device is missing" if self.broken == "missing" else None

    def uuid(self) -> str:
        return os.environ.get("FAKE_CUDA_UUID", "GPU-fake")

    def allocate(self, num_bytes: int) -> DeviceBlock:
        if num_bytes > int(os.environ.get("FAKE_CUDA_FREE", 1 << 40)):
            raise MemoryError("the fake device is full")
        arena, name = create_arena(_DATA_OFFSET + num_bytes)
        return self._block(arena, name, False)

    def _block(self, arena: Arena, name: ArenaName, imported: bool) -> DeviceBlock:
        data = torch.frombuffer(arena.memory, dtype=torch.uint8)[_DATA_OFFSET:]
        block = DeviceBlock(arena.address, imported, data)
        _names[block.pointer] = name
        return block

    def allow_queries_while_capturing(self) -> None:
        """It has no graphs."""

    def trim(self) -> None:
        os.environ["FAKE_CUDA_FREE"] = str(2 * int(os.environ["FAKE_CUDA_FREE"]))

    def export(self, block: DeviceBlock) -> bytes:
        if self.broken == "export":
            raise MemoryError("cuIpcGetMemHandle: CUDA_ERROR_OUT_OF_MEMORY")
        return json.dumps(asdict(_names[block.pointer])).encode()

    def open(self, handle: bytes, num_bytes: int) -> DeviceBlock:
        if self.broken == "open":
            raise DriverError("the fake driver refuses\nwith advice, as torch has it behind CUDA's own text")
        if self.broken == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.broken == "memory":
            return replace(self.allocate(num_bytes), imported=True)
        name = ArenaName(**json.loads(handle))
        arena = attach_arena(name)
        os.close(arena.fd)
        return self._block(arena, name, True)

    def release(self, block: DeviceBlock) -> None:
        name = _names.pop(block.pointer)
        released.append(block.imported)
        if not block.imported:
            os.close(name.fd)

    def register(self, address: int, num_bytes: int) -> int:
        if self.broken == "register":
            raise DriverError("cuMemHostRegister_v2: CUDA_ERROR_NOT_SUPPORTED")
        registered.add(address)
        return address

    def unregister(self, address: int) -> None:
        registered.remove(address)

    def write_words(self, stream: FakeStream, words: Mapping[int, int]) -> None:
        for pointer, value in words.items():
            stream.issue(partial(setattr, ctypes.c_int64.from_address(pointer), "value", value))

    def wait_for_words(self, stream: FakeStream, words: Mapping[int, int]) -> None:
        for pointer, value in words.items():
            word = ctypes.c_int64.from_address(pointer)
            # As on a device, this process does not notify it that the word has changed.
            ready = (lambda: False) if self.broken == "word" else (lambda word=word, value=value: word.value >= value)
            stream.issue(lambda: None, ready)


_names: dict[int, ArenaName] = {}
# Host addresses that the device may use.
registered: set[int] = set()
# For each released block, whether it belonged to another process.
released: list[bool] = []


def close_names() -> None:
    """Close the names that another process could attach to, if ranks were threads and no process did."""
    while _names:
        os.close(_names.popitem()[1].fd)


def _over(staged: Any) -> Any:
    staged._host = OnHost(staged._host)
    return staged


def install(seed: int) -> None:
    """Make every dense CPU tensor of this process a tensor of the fake device."""
    gpu = FakeGpu(seed)
    FakeCuda.gpu = gpu
    driver.CudaRuntime = runtime.AcceleratorRuntime = FakeCuda  # type: ignore[misc]
    collective_group.AcceleratorRuntime = FakeCuda  # type: ignore[misc]
    set_up = device_side.set_up_staging
    device_side.set_up_staging = lambda host, *args: _over(set_up(host, *args))
    device_setup.STEP_S = float(os.environ.get("FAKE_CUDA_STEP_S", device_setup.STEP_S))
    collective_group.in_host_memory = lambda *tensors: False
    collective_group.PreparedCalls.find = lambda *args: None
    # Both work on the host, whose tensors are also the device's here.
    group = collective_group.CollectiveGroup
    for name in ("_run_gloo", "_exchange_sizes"):
        setattr(group, name, _off_stream(getattr(group, name)))


def _off_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        for stream in _stack()[-1:]:
            stream.synchronize()
        with _disable_current_modes():
            return method(*args)

    return wrapped
