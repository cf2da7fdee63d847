"""An accelerator as the backends use it: one device, the stream of a group on it, a call on that stream. Imports torch.

Everything that needs an accelerator is behind `AcceleratorRuntime`, and behind `driver.CudaRuntime` what needs CUDA, both of which
the tests replace. Streams and events are those of `torch.cuda`, or what behaves like them.

A call works on a stream of the group's own, which first waits for what the caller's stream had been given when the call was
made. The caller's stream later waits for the call's last event. Neither stops the host, and a call's kernels run beside the
caller's, such as those of a backward pass.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


class AcceleratorRuntime:
    """One device of any kind that has streams in torch: CUDA, ROCm (which torch calls cuda), XPU.

    Args:
        device: With an index.

    Raises:
        ValueError: torch has no streams for such a device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index: int = device.index
        self._can_pin = True
        self._module: Any = torch.get_device_module(device)
        # torch 2.15 has streams for mps too, which know of no device.
        if not (hasattr(self._module, "Stream") and hasattr(self._module, "device")):
            raise ValueError(
                f"A collective got a tensor on {device}, and torch has no streams for such a device; pass a copy on the CPU."
            )

    @staticmethod
    def owns(tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on an accelerator."""
        return not (tensor.is_cpu or tensor.is_meta)

    def new_stream(self) -> Any:
        """Create a stream of the device."""
        return self._module.Stream(self.device)

    def current_stream(self) -> Any:
        """Return the calling thread's stream."""
        return self._module.current_stream(self.device)

    def current(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's: some of torch's calls make a context on whichever device that is."""
        device: AbstractContextManager[Any] = self._module.device(self.device)
        return device

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make `stream` and its device the calling thread's."""
        # The device first: leaving a stream alone makes a context on the device that the thread had before.
        with self.current(), self._module.stream(stream):
            yield

    def is_capturing(self) -> bool:
        """Return whether the calling thread's stream is being captured in a graph."""
        return bool(getattr(self._module, "is_current_stream_capturing", bool)())

    def new_event(self) -> Any:
        """Create an event of this process."""
        return self._module.Event()

    def synchronize(self) -> None:
        """Block the host until the device has completed all its work."""
        self._module.synchronize(self.device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory of the host that the device copies to and from by itself; 1-D uint8.

        torch's allocator reuses freed memory only after the copies that were issued with it, on whatever stream.
        """
        if self._can_pin:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                # Such as a limit on locked memory. Copies are in order with pageable memory too, but block the host.
                self._can_pin = False
                logger.warning("ray_fracbackend: host memory cannot be pinned, so staged copies are slow: %s", error)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Record `stream` with the allocator as a user of the tensor, so that its memory is not reused too early."""
        tensor.record_stream(stream)

    def new_future(self) -> torch.futures.Future[Any]:
        """Create a future whose waiter's stream waits for the work behind the value, as NCCL's does."""
        return torch.futures.Future(devices=[self.device])

    def complete(self, future: torch.futures.Future[Any], value: Any, stream: Any) -> None:
        """Set the result of `future` behind the work on `stream` so far."""
        with self.on(stream):
            future.set_result(value)


class CommunicationStream:
    """The stream of one group on one device.

    Attributes:
        runtime: The device.
        stream: The stream.
        last: The last call, from the beginning of its issue; None before the first.
        timeout_s: Timeout of that call.
    """

    def __init__(self, runtime: AcceleratorRuntime) -> None:
        self.runtime: Any = runtime
        self.stream = runtime.new_stream()
        self.last: Any = None
        self.timeout_s = math.inf

    def renew(self) -> None:
        """Use a new stream, because the old one may be stuck."""
        self.stream = self.runtime.new_stream()
        self.last = None


class DeviceCall:
    """One call on a communication stream. Made by the caller, run once by whichever thread has the turn.

    Args:
        stream: The group's.
        prepare: Runs first, outside of the stream: may set the group up.
        function: Issues the work.
        tensors: The call's tensors on the device.
        is_async: Whether the caller may free them before its stream has waited for the work.
        timeout_s: How long the device may take.

    Attributes:
        done: Event behind the work, once it has been issued.

    Raises:
        RuntimeError: The caller's stream is being captured in a CUDA graph.
    """

    def __init__(
        self,
        stream: CommunicationStream,
        prepare: Callable[[], None],
        function: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        is_async: bool,
        timeout_s: float,
    ) -> None:
        self.stream = stream
        self._timeout_s = timeout_s
        self._is_async = is_async
        self.done: Any = None
        self._prepare = prepare
        self._function: Callable[[], None] | None = function
        self._tensors = tensors
        if stream.runtime.is_capturing():
            raise RuntimeError(
                "Collectives of the backends ipc and staged cannot be captured in a CUDA graph, because ranks also synchronize on the host; "
                "capture the computation without them, or use NCCL with a separate device for each rank."
            )
        self._ready = stream.runtime.new_event()
        self._ready.record(stream.runtime.current_stream())

    def __call__(self) -> None:
        """Issue the work."""
        function = self._function
        assert function is not None
        self._prepare()
        runtime, stream = self.stream.runtime, self.stream.stream
        with runtime.on(stream):
            stream.wait_event(self._ready)
            if self._is_async:
                self._keep_tensors()
            # Already now: CUDA may block the host in a launch until the device has gone on.
            before, self.stream.last, self.stream.timeout_s = self.stream.last, self, self._timeout_s
            try:
                function()
            except BaseException:
                # The stream may be stuck, so the caller's must not wait for what has been issued.
                self.stream.last = before
                self._keep_tensors()
                raise
            done = runtime.new_event()
            done.record(stream)
        self.done = done
        # The work that was issued keeps the memory; this object may live as long as the caller's Work.
        self._function, self._tensors = None, ()

    def query(self) -> bool:
        """Return whether the work has been issued and the device has finished it."""
        return self.done is not None and bool(self.done.query())

    def _keep_tensors(self) -> None:
        for tensor in self._tensors:
            self.stream.runtime.keep(tensor, self.stream.stream)

    def join(self) -> None:
        """Make the calling thread's stream wait for the work, which must have been issued."""
        self.stream.runtime.current_stream().wait_event(self.done)


def comes_true(condition: Callable[[], bool], patience_s: float) -> bool:
    """Return whether a condition of the device becomes true within `patience_s` seconds; for set-up and shutdown only."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
