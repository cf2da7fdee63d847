"""How a call of the ``ipc`` process group is run: where, by which thread, on which stream. Imports torch.

Which memory carries a call is decided once, from its tensors. Calls on the host are run by `executor` alone; calls on a
CUDA device are issued by it to the group's stream on that device (`streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import profiler_enabled
from ..device.runtime import DeviceCall
from ..errors import CollectiveMismatchError, IpcError
from ..protocol.description import description_text, operation_of, through_gloo
from ..protocol.hierarchy import Collectives
from ..protocol.reductions import Reduction, can_reduce, supported_ops
from .arguments import check_class, check_writable, is_wrapper, timeout_of, wants_async
from .observers import PLAIN, hidden, is_without_data, recorded
from .process_group import ProcessGroupBase
from .work import CompletedDeviceWork, CompletedWork, PendingDeviceWork, PendingWork

Tensors = Sequence[torch.Tensor]
HOST = torch.device("cpu")
# Of tensors that have a shape alone.
NOWHERE = torch.device("meta")


def in_host_memory(*tensors: torch.Tensor) -> bool:
    """Whether shared host memory can carry these tensors: on the CPU, dense, not quantized, and of no odd class."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if type(tensor) not in PLAIN and (is_without_data(tensor) or is_wrapper(tensor)):
            return False
    return True


def _in_inference_mode(function: Callable[[], None]) -> Callable[[], None]:
    """Tensors made under inference_mode may be changed only under it, in whichever thread."""

    def guarded() -> None:
        with torch.inference_mode():
            function()

    return guarded


class LaunchingGroup(ProcessGroupBase):
    """Adds the running of calls; `operations.IpcProcessGroup` adds the calls."""

    def _carrier_of(self, *tensors: torch.Tensor) -> torch.device | None:
        """Whose shared memory can carry these tensors: the host's, a CUDA device's, or None for nobody's.

        Raises:
            TypeError: One is a wrapper of other tensors.
            ValueError: Some have no data, and others have.
        """
        if in_host_memory(*tensors):
            return HOST
        for tensor in tensors:
            check_class(tensor)
        if any(map(is_without_data, tensors)):
            if not all(map(is_without_data, tensors)):
                raise ValueError(
                    "A collective got meta or fake tensors beside real ones; pass either all with data or none."
                )
            return NOWHERE
        return self._device_side.carries(tensors)

    def _launch(
        self,
        device: torch.device,
        opts: Any,
        description: bytes,
        function: Callable[[Collectives], None],
        gloo: Callable[[], Any],
        tensors: Tensors,
        results: list[torch.Tensor],
        written: Tensors | None = None,
    ) -> Any:
        """Run a call through shared memory.

        Args:
            device: From `_carrier_of`. Tensors without data are left as they are, and no rank hears of the call.
            opts: torch's options.
            description: Of the call.
            function: Does the work with the collectives that it is given.
            gloo: Starts the same in the inner Gloo group, for a device whose memory turns out not to be usable.
            tensors: All tensors of the call.
            results: The value of the future.
            written: The tensors that this rank writes to, by default `results`.

        Raises:
            ValueError: One of `written` has several elements at one place in memory.
        """
        check_writable(description, results if written is None else written)
        if device is NOWHERE:
            return CompletedWork(results)
        if device is HOST:
            on_host = self._begun(description, tensors, self._guarded(function, self._collectives))
            return self._execute(opts, on_host, results)
        timeout_s = timeout_of(opts, self._timeout_s)

        def prepare() -> None:
            self._device_side.prepare(device, description, timeout_s)

        def on_device() -> None:
            there = self._device_side.collectives(device)
            if there is None:
                self._run_gloo(gloo, through_gloo(description), timeout_s)
            else:
                function(there)

        issue = self._begun(description, tensors, self._guarded(on_device))
        return self._execute_on(device, opts, issue, tensors, results, self._guarded(prepare))

    def _through_gloo(
        self, opts: Any, description: bytes, start: Callable[[], Any], tensors: Tensors, results: list[torch.Tensor]
    ) -> Any:
        """Run a Gloo operation in its turn, after the ranks have compared descriptions."""
        timeout_s = timeout_of(opts, self._timeout_s)
        description = through_gloo(description)

        def in_turn() -> None:
            self._run_gloo(start, description, timeout_s)

        function = self._begun(description, tensors, in_turn)
        device = self._device_side.device_of(tensors)
        if device is None:
            return self._execute(opts, function, results)
        return self._execute_on(device, opts, function, tensors, results)

    def _begun(self, description: bytes, tensors: Tensors, function: Callable[[], None]) -> Callable[[], None]:
        """Count a call, and record it where a profile is being taken."""
        self._num_calls += 1
        if self._num_calls == 1:
            self._warn_of_pair()
        return recorded(operation_of(description), tensors, function) if profiler_enabled() else function

    def _run_gloo(self, start: Callable[[], Any], description: bytes, timeout_s: float) -> None:
        self._collectives.barrier(description, timeout_s)
        # Gloo tells the other ranks itself, and what it merely cannot do must not break the group.
        start().wait()

    def _guarded(self, function: Callable[..., None], *args: Any) -> Callable[[], None]:
        """A failure that the engine has not seen must reach the other ranks as well."""

        def guarded() -> None:
            try:
                function(*args)
            except (IpcError, ValueError):
                # Wrong arguments are found before anything is published, and are as wrong on the other ranks.
                raise
            except BaseException as error:
                self._local.engine.fail(f"{type(error).__name__}: {error}")
                raise

        return guarded

    def _execute(self, opts: Any, function: Callable[[], None], results: list[torch.Tensor]) -> Any:
        """Run `function` now or, if the caller does not wait, queue it."""
        for result in results:
            if result.is_inference():
                function = _in_inference_mode(function)
                break
        if wants_async(opts):
            return PendingWork(self._executor.submit(hidden(function)), self._executor, results)
        self._executor.run(hidden(function))
        return CompletedWork(results)

    def _execute_on(
        self,
        device: torch.device,
        opts: Any,
        function: Callable[[], None],
        tensors: Tensors,
        results: list[torch.Tensor],
        prepare: Callable[[], None] = lambda: None,
    ) -> Any:
        """As `_execute`, for a function that issues work to a device; `prepare` runs before it, off the stream."""
        stream = self._device_side.stream_of(device)
        if any(result.is_inference() for result in results):
            function = _in_inference_mode(function)
        if wants_async(opts):
            on_device = [tensor for tensor in tensors if tensor.device == device]
            call = DeviceCall(stream, prepare, function, on_device)
            return PendingDeviceWork(self._executor.submit(hidden(call)), self._executor, results, call)
        call = DeviceCall(stream, prepare, function, ())
        self._executor.run(hidden(call))
        call.join()
        return CompletedDeviceWork(results, stream)

    def _all_of(self, works: list[Any], opts: Any, results: list[torch.Tensor]) -> Any:
        """One Work for calls already launched: the queue is in order, so an empty last entry is enough.

        Raises:
            ValueError: There is none.
        """
        if not works:
            raise ValueError("A coalesced collective got no tensors; pass at least one.")

        def first_error() -> None:
            for work in works:
                if work.exception() is not None:
                    raise work.exception()

        device = self._device_side.device_of(results)
        if device is not None:
            return self._execute_on(device, opts, first_error, (), results)
        return self._execute(opts, first_error, results) if wants_async(opts) else CompletedWork(results)

    def _reduction_of(self, operation: str, dtype: torch.dtype, op: Any) -> Reduction:
        """The reduction of an element type.

        Raises:
            ValueError: It has no such operation.
        """
        reduction = self._reductions.get((dtype, op))
        if reduction is None:
            if not can_reduce(dtype, op):
                raise ValueError(
                    f"{operation} cannot reduce {dtype} with {op.name}; this element type has: {supported_ops(dtype)}."
                )
            reduction = self._reductions[dtype, op] = Reduction(dtype, op, self._num_ranks)
        return reduction

    def _exchange(
        self,
        collectives: Collectives,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        description: bytes,
        timeout_s: float,
    ) -> None:
        """All-to-all of parts of any size: first the sizes, on the host, then the data."""
        max_bytes = self._exchange_sizes(inputs, outputs, description, timeout_s)
        collectives.exchange(inputs, outputs, max_bytes, description, timeout_s)

    def _exchange_sizes(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], description: bytes, timeout_s: float
    ) -> int:
        """Bytes of the largest part of all ranks, after all have seen that the parts fit."""
        size = self._num_ranks
        own = torch.tensor([t.numel() * t.element_size() for t in (*inputs, *outputs)], dtype=torch.int64, device=HOST)
        table = torch.empty((size, 2 * size), dtype=torch.int64, device=HOST)
        self._collectives.all_gather(own, list(table), description, timeout_s)
        sent, expected = table[:, :size], table[:, size:].t()
        wrong = (sent != expected).nonzero()
        if wrong.numel():
            # Every rank has the same table, so every rank raises the same here.
            source, target = wrong[0].tolist()
            names = self.membership.names
            reason = (
                f"{description_text(description)}: {names[source]} sends {int(sent[source, target])} bytes to "
                f"{names[target]}, which expects {int(expected[source, target])}; make both sides' splits agree."
            )
            self._local.engine.fail(reason)
            raise CollectiveMismatchError(reason)
        return int(sent.max())
