"""How a group's calls on a CUDA device meet the streams of their callers. Runs in every rank; imports torch.

A call works on a stream of the group's own, which first waits for what the caller's stream had been given when the call
was made. The caller's stream later waits for the call's last event. Neither stops the host, and a call's kernels run
beside the caller's, such as those of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .runtime import CudaRuntime


class CommunicationStream:
    """The stream of one group on one device.

    Attributes:
        runtime: The device.
        stream: The stream.
        last: Event behind the last call, None before the first.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self.stream = runtime.new_stream()
        self.last: Any = None

    def renew(self) -> None:
        """Go on with a fresh stream, because the old one may be stuck."""
        self.stream = self.runtime.new_stream()
        self.last = None

    def mark(self) -> Any:
        """An event behind everything that the calling thread's stream has been given.

        Raises:
            RuntimeError: The stream is being captured in a CUDA graph.
        """
        if self.runtime.is_capturing():
            raise RuntimeError(
                "Collectives of the ipc backend cannot be captured in a CUDA graph, because ranks also meet on the host; "
                "capture the computation without them, or use a device of its own for each rank and NCCL."
            )
        event = self.runtime.new_event()
        event.record(self.runtime.current_stream())
        return event

    def join(self, done: Any) -> None:
        """Make the calling thread's stream wait for `done`."""
        self.runtime.current_stream().wait_event(done)


class DeviceCall:
    """One call on a communication stream. Made by the caller, run once by whichever thread has the turn.

    Args:
        stream: The group's.
        prepare: Runs first, outside of the stream: may set the group up.
        function: Issues the work.
        tensors: Those that the caller may free before its stream has waited for the work.

    Attributes:
        done: Event behind the work, once it has been issued.
    """

    def __init__(
        self,
        stream: CommunicationStream,
        prepare: Callable[[], None],
        function: Callable[[], None],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self.stream = stream
        self.done: Any = None
        self._prepare = prepare
        self._function: Callable[[], None] | None = function
        self._tensors = tensors
        self._ready = stream.mark()

    def __call__(self) -> None:
        """Issue the work."""
        function = self._function
        assert function is not None
        self._prepare()
        runtime, stream = self.stream.runtime, self.stream.stream
        with runtime.on(stream):
            stream.wait_event(self._ready)
            for tensor in self._tensors:
                runtime.keep(tensor, stream)
            function()
            done = runtime.new_event()
            done.record(stream)
        self.done = self.stream.last = done
        # The work that was issued keeps the memory; this object may live as long as the caller's Work.
        self._function, self._tensors = None, ()

    def join(self) -> None:
        """Make the calling thread's stream wait for the work, which must have been issued."""
        self.stream.join(self.done)
