"""A c10d process group in Python: its lifecycle, how it runs a call, and every collective. Imports torch.

The tensors of a call decide its path. Dense CPU tensors use the collectives of host memory. Dense tensors on
the group's accelerator use the path that `device.side` has set up. All others (sparse, quantized, on two devices) are
copied to the host whole and use an inner Gloo group. That group is also registered as torch's backend, which handles
everything that is not overridden (group names, object lookups from C++). `executor` runs every call. On a device it
issues the work to the group's stream.

Each collective behaves like the one of `torch.distributed` of the same name, under all names that torch 2.7 to 2.15
call. With ``asyncOp`` the call returns at once; the caller must not touch the tensors before ``Work.wait()``. Otherwise
it blocks until this rank's part is done; on a device, until the work is issued and the caller's stream waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._torch import (
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    RedOpType,
    c10d,
    dispatch_modes,
    profiler_enabled,
    set_timeout,
    stop,
)
from ..device.runtime import AcceleratorRuntime, DeviceCall
from ..device.side import DeviceSide
from ..errors import CollectiveMismatchError, CollectiveTimeoutError, IpcError
from ..protocol.collectives import Collectives, HostCollectives
from ..protocol.description import Terms, describe_call, description_text, operation_of, through_gloo
from ..protocol.reductions import Reduction, check_reduces, plain_op, premul_factor, scaled
from .arguments import (
    check_class,
    check_disjoint,
    check_one_type,
    check_pairs,
    check_same,
    check_writable,
    equal_parts,
    flat,
    flat_view,
    is_wrapper,
    lists,
    on_host,
    root_of,
    single,
    split_parts,
    takes,
    timeout_of,
    wants_async,
)
from .executor import DONE, Executor
from .observers import PLAIN, flushes_denormals, hide_package, is_without_data, recorded, run_hidden
from .prepared_calls import PreparedCalls
from .work import FinishedWork, IpcWork, ReceiveWork, keep_work_of_reducers

logger = logging.getLogger(__name__)

Tensors = Sequence[torch.Tensor]
# Runs a call: the collectives to use, the flat memory of the call's results, and the terms.
Run = Callable[[Collectives, list[torch.Tensor], Terms], None]
# An operation of the inner Gloo group, by its name in torch 2.13, and its arguments without the options.
GlooCall = tuple[Any, ...]
# Starts a call that has been checked, and returns its Work.
Start = Callable[[], Any]

HOST = torch.device("cpu")
# Stands for the device of tensors without data.
META = torch.device("meta")
# Names of Gloo's operations on single tensors before torch 2.13.
_OLD_GLOO_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
_GLOO_NAME = ProcessGroup.BackendType.CUSTOM
# How long shutdown waits for calls in progress; their own timeouts may be half an hour.
_SHUTDOWN_S = 5.0

_groups: weakref.WeakSet[CollectiveGroup] = weakref.WeakSet()


def _keep_groups() -> None:
    """Keep all groups alive in a forked child: Gloo's destructor would wait for ever for threads of the parent."""
    for group in list(_groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_keep_groups)


class CollectiveGroup(ProcessGroup):  # type: ignore[misc]  # torch gives it no type
    """Base class of this package's process groups. A subclass sets up the collectives that move the tensors.

    Args:
        name: Name of the backend.
        store: The group's store.
        rank: This process's rank in the group.
        size: Ranks of the group.
        timeout: Default timeout of a collective.
        global_ranks: Global rank of each group rank, for messages; empty means the same numbers.
        devices: Device types to register the group for.
    """

    # Collectives of CPU tensors, and of accelerator tensors. Each subclass creates its own.
    _host: HostCollectives
    _device_side: DeviceSide
    # Backend names with which a user requests this group from torch, alone or in a pair.
    _asked_as: frozenset[str]

    def __init__(
        self,
        name: str,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        global_ranks: Sequence[int],
        devices: Sequence[str],
    ) -> None:
        super().__init__(rank, size)
        _groups.add(self)
        hide_package()
        keep_work_of_reducers()
        self._name = name
        self._store = _unused(store, size)
        self._names = tuple(f"rank {global_ranks[r] if global_ranks else r}" for r in range(size))
        _meet(self._store, rank, self._names, timeout)
        self._num_ranks = size
        self._own_rank = rank
        self._sequence_number = 0
        self._timeout = timeout
        # Connected now: Gloo's lazy connections wait without a limit for a rank that has ended.
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", self._store), rank, size, timeout)
        for device in devices:
            self._register_backend(torch.device(device), _GLOO_NAME, self._gloo)
        self._set_default_backend(_GLOO_NAME)
        self._executor = Executor(f"{name} rank {rank}", self._pass_on)
        self._reductions: dict[tuple[torch.dtype, Any], Reduction] = {}
        self._prepared_calls = PreparedCalls(self._reductions, lambda opts: timeout_of(opts, self._timeout_s))

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        """Return the Gloo group for any device: torch 2.15 requests a backend before `batch_isend_irecv`."""
        try:
            return super()._get_backend(device)
        except RuntimeError:  # a device type that was added to torch after this module was imported
            return self._gloo

    @property
    def staged_reason(self) -> str | None:
        """Why accelerator tensors are staged through host memory; None if they are not, or before the first one."""
        return self._device_side.staged_reason

    @property
    def device_path(self) -> str | None:
        """How accelerator tensors travel, for reports; None before the first such tensor."""
        return self._device_side.path

    @property
    def _timeout_s(self) -> float:
        """Default timeout in seconds: that of the inner Gloo group, the only one that ``_set_pg_timeout`` sets."""
        timeout: timedelta = self._gloo.options._timeout
        if timeout != self._timeout:
            self.set_timeout(timeout)
        return timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the sequence number begins at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called, for torch's function of the same name."""
        return self._sequence_number

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of later collectives."""
        self._timeout = timeout
        set_timeout(self._gloo, timeout)

    def abort(self) -> None:
        """Break the group: calls in progress and later ones raise on every rank. May be called again.

        Does nothing in a forked child, like `shutdown`: the group belongs to the parent.
        """
        if not self._executor.is_own():
            return
        reason = f"{self._names[self._own_rank]} aborted the process group"
        self._device_side.abort(reason)
        self._host.abort(reason)
        self._prepared_calls.close()
        self._executor.close(_SHUTDOWN_S)
        stop(self._gloo, "abort")

    def shutdown(self) -> None:
        """Leave the group after the calls in progress; later calls of this rank raise. May be called again."""
        if not self._executor.is_own():
            return
        idle = self._executor.close(_SHUTDOWN_S)
        self._prepared_calls.close()
        self._device_side.shutdown(idle)
        self._host.close(idle)
        stop(self._gloo, "shutdown")

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: torch's version would crash the process, because groups in Python lack the store that it clones.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"A process group of backend {self._name} cannot be split; create the subgroup with "
            "torch.distributed.new_group(ranks)."
        )

    # How a call is run.

    def _launch(
        self,
        device: torch.device | None,
        opts: Any,
        description: bytes,
        run: Run,
        gloo: GlooCall,
        tensors: Tensors,
        results: list[torch.Tensor],
        written: Tensors | None = None,
    ) -> Start:
        """Return a function that starts a call on the path for its tensors. Tensors without data stay unchanged.

        Args:
            device: From `_carrier_of`; None for a copy on the host and Gloo.
            opts: torch's options.
            description: Description of the call.
            run: Runs the call with the chosen collectives.
            gloo: The same call for the inner Gloo group.
            tensors: All tensors of the call.
            results: The value of the future.
            written: The tensors that this rank writes to: `results` (the default) or none.

        Raises:
            ValueError: Elements of a tensor in `written` share memory.
        """
        written = results if written is None else written
        # The time limit of an asynchronous call begins now, not when a thread begins the call.
        terms = Terms.within(description, timeout_of(opts, self._timeout_s))

        def run_on(collectives: Collectives) -> None:
            flats, copies = [], []
            for tensor in results:
                view = flat_view(tensor)
                if view is None:
                    # A result is also an input only if the call has no other tensors.
                    if len(tensors) == len(results):
                        view = flat(tensor)
                    else:
                        view = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
                    copies.append((tensor, view))
                flats.append(view)
            run(collectives, flats, terms)
            if written:
                for tensor, copy in copies:
                    tensor.data.copy_(copy.view(tensor.shape))  # as in `flat_view`

        if device is HOST:
            check_writable(description, written)
            return partial(self._execute, None, opts, description, partial(run_on, self._host), tensors, results)
        if device is None:
            first = self._device_side.device_of(tensors)
            to_gloo = partial(self._run_gloo, gloo, opts, terms, first, tensors, written)
            return partial(self._execute, first, opts, description, to_gloo, tensors, results)
        check_writable(description, written)
        if device is META:
            return partial(IpcWork, DONE, self._executor, results)

        def on_device() -> None:
            collectives = self._device_side.collectives(device)
            if collectives is None:  # the group uses another device, set up by a call that was queued before this one
                self._run_gloo(gloo, opts, terms, device, tensors, written)
            else:
                run_on(collectives)

        prepare = partial(self._device_side.prepare, device, terms)
        return partial(self._execute, device, opts, description, on_device, tensors, results, prepare)

    def _carrier_of(self, *tensors: torch.Tensor) -> torch.device | None:
        """Return the path for these tensors: `HOST`, the accelerator's device, `META` (no data), or None for Gloo.

        Raises:
            TypeError: A tensor wraps other tensors.
            ValueError: Some tensors have data and others have none.
        """
        if in_host_memory(*tensors):
            return HOST
        for tensor in tensors:
            check_class(tensor)
        if any(map(is_without_data, tensors)):
            if not all(map(is_without_data, tensors)):
                raise ValueError(
                    "A collective got meta or fake tensors beside real ones; pass only tensors with data, or only ones without."
                )
            return META
        return self._device_side.carries(tensors)

    def _begun(self, description: bytes, tensors: Tensors, function: Callable[[], None]) -> Callable[[], None]:
        """Count a call, and record it if the profiler is active."""
        self._sequence_number += 1
        if self._sequence_number == 1:
            self._warn_of_pair()
        return recorded(operation_of(description), tensors, function) if profiler_enabled() else function

    def _warn_of_pair(self) -> None:
        """Warn about a pair with another backend: torch uses a group written in Python for all devices."""
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a group that is not registered with torch
            asked = dist.get_backend_config(self)
            if self._own_rank == 0 and not {part.partition(":")[2] for part in asked.split(",")} <= self._asked_as:
                logger.warning(
                    "ray_fracbackend: this process group was requested as %s, but torch.distributed uses %s for all devices of such "
                    "a group. To use another backend, create a second group, such as new_group(backend='nccl').",
                    asked,
                    self._name,
                )

    def _run_gloo(
        self,
        call: GlooCall,
        opts: Any,
        terms: Terms,
        first: torch.device | None,
        tensors: Tensors,
        written: Tensors,
    ) -> None:
        """Run a Gloo operation on host copies, after the ranks have compared the descriptions of their calls.

        Args:
            call: The operation and its arguments.
            opts: Its options.
            terms: Terms of the call.
            first: The device whose group stream is current in this thread and waits for the caller's stream.
            tensors: All tensors of the call.
            written: The tensors that this rank writes to.
        """
        self._host.barrier(through_gloo(terms))
        for device in {tensor.device for tensor in tensors if AcceleratorRuntime.owns(tensor)} - {first}:
            AcceleratorRuntime(device).synchronize()
        operation, *args = call
        copies: dict[int, torch.Tensor] = {}
        limit, opts.timeout = opts.timeout, terms.left()
        try:
            self._gloo_method(operation)(*(on_host(arg, copies) for arg in args), opts).wait()
        except (RuntimeError, TypeError) as error:
            # Gloo itself reports failures to the other ranks. An unsupported operation must not break the group.
            raise IpcError(str(error)) from error
        finally:
            opts.timeout = limit  # the caller may use the options again
        for tensor in written:
            if id(tensor) in copies:
                tensor.data.copy_(copies[id(tensor)])  # as in `flat_view`

    def _gloo_method(self, operation: str) -> Callable[..., Any]:
        """Return an operation of Gloo, by its name in the installed torch."""
        if operation == "all_to_all":
            return self._gloo_all_to_all
        name = _OLD_GLOO_NAMES.get(operation, operation)
        method: Callable[..., Any] = getattr(self._gloo, name if hasattr(self._gloo, name) else operation)
        return method

    def _gloo_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Any:
        """All-to-all of lists, which Gloo supports only for single tensors."""
        source = torch.cat([t.reshape(-1) for t in inputs])
        target = torch.empty(sum(t.numel() for t in outputs), dtype=source.dtype, device=source.device)
        sizes = [t.numel() for t in outputs]
        work = self._gloo_method("all_to_all_single")(target, source, sizes, [t.numel() for t in inputs], opts)
        work.wait()
        for output, part in zip(outputs, target.split_with_sizes(sizes), strict=True):
            output.data.copy_(part.view(output.shape))  # as in `flat_view`
        return work

    def _pass_on(self, error: BaseException) -> None:
        """Break the group after a failure outside the engine, so that the other ranks do not wait for this one."""
        # A ValueError is raised before this rank announces anything; the other ranks raise it for the same arguments.
        if not isinstance(error, IpcError) and type(error) is not ValueError:
            self._host.fail(f"{type(error).__name__}: {error}")

    def _execute(
        self,
        device: torch.device | None,
        opts: Any,
        description: bytes | None,
        function: Callable[[], None],
        tensors: Tensors,
        results: list[torch.Tensor],
        prepare: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run `function` now or, for an asynchronous call, queue it.

        Args:
            device: The device that it issues work to; None for the host.
            opts: torch's options.
            description: Description of the call; None if it is not to be counted as a call.
            function: Does the work.
            tensors: All tensors of the call.
            results: The value of the future.
            prepare: On a device, runs before the work, outside the group's stream.
        """
        if description is not None:
            function = self._begun(description, tensors, function)
        for result in results:
            if result.is_inference():
                function = _in_inference_mode(function)
                break
        is_async, call = wants_async(opts), None
        if device is not None:
            there = [tensor for tensor in tensors if tensor.device == device]
            timeout_s = timeout_of(opts, self._timeout_s)
            function = call = DeviceCall(
                self._device_side.stream_of(device), prepare, function, there, is_async, timeout_s
            )
        if is_async:
            hidden = partial(run_hidden, function, flushes_denormals())
            return IpcWork(self._executor.submit(hidden), self._executor, results, call)
        if dispatch_modes():
            function = partial(run_hidden, function, flushes_denormals())
        self._executor.run(function)
        if call is not None:
            call.join()
        return IpcWork(DONE, self._executor, results, call)

    def _all_of(self, name: str, calls: Iterable[tuple[Any, ...]], opts: Any, results: list[torch.Tensor]) -> Start:
        """Check several calls and return a function that starts them all, with one Work.

        Args:
            name: Method of each call.
            calls: The arguments of each call without the options.
            opts: torch's options.
            results: The value of the future.

        Raises:
            ValueError: `calls` is empty, or a call has wrong arguments.
        """
        starts = [getattr(CollectiveGroup, name).__wrapped__(self, *call, opts) for call in calls]
        if not starts:
            raise ValueError("A coalesced collective got no tensors; pass at least one.")

        def start_all() -> Any:
            works = [start() for start in starts]
            call = next((work.call for work in works if work.call is not None), None)
            if not wants_async(opts):
                return IpcWork(DONE, self._executor, results, call)

            def first_error() -> None:
                for work in works:
                    if work.exception() is not None:
                        raise work.exception()

            # The queue is in order: this last entry, which only raises the first error, ends after all calls.
            device = None if call is None else call.stream.runtime.device
            return self._execute(device, opts, None, first_error, (), results)

        return start_all

    # Collectives that reduce.

    def _reduction_of(self, device: torch.device | None, operation: str, dtype: torch.dtype, op: Any, kind: Any) -> Any:
        """Return the `Reduction` of a call and its factor; (None, None) for Gloo, which supports other dtypes.

        Raises:
            ValueError: The dtype does not support this operation.
        """
        if device is None:
            return None, None
        reduction = self._reductions.get((dtype, kind))
        if reduction is None:
            check_reduces(operation, dtype, kind)
            reduction = self._reductions[dtype, kind] = Reduction(dtype, kind, self._num_ranks)
        return reduction, premul_factor(op) if kind is RedOpType.PREMUL_SUM else None

    def _prepared_all_reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if type(tensors) is not list or len(tensors) != 1:
            return None
        return self._prepared("all_reduce", tensors[0], tensors[0], opts, opts.reduceOp)

    def _prepared_reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return self._prepared("reduce_scatter_tensor", output, tensor, opts, opts.reduceOp)

    def _prepared_all_gather(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return self._prepared("all_gather_into_tensor", output, tensor, opts)

    def _prepared(
        self, operation: str, output: torch.Tensor, source: torch.Tensor, opts: Any, reduce_op: Any = None
    ) -> Any:
        """Make a call on its prepared path and return its Work; None if it needs the general path."""
        found = self._prepared_calls.find(self._host, operation, output, source, reduce_op)
        if found is None:
            return None
        call, to, address = found
        if not wants_async(opts):
            done = self._executor.run(call.run, to, address, opts)
        elif self._executor.is_free():
            done = self._executor.run(call.start, to, address, opts, partial(self._queue, output, source))
        else:
            return None
        if not done:
            return None
        self._sequence_number += 1
        if done is not True:
            return done
        work = FinishedWork()
        work.tensors = [output]
        return work

    def _queue(self, output: torch.Tensor, source: torch.Tensor, rest: Callable[[], None]) -> IpcWork:
        """Queue the rest of a prepared call, and keep its tensors until then."""
        flushes = flushes_denormals()
        kept = partial(lambda *_: run_hidden(rest, flushes), output, source)
        return IpcWork(self._executor.submit(kept, is_rest=True), self._executor, [output])

    @takes("AllreduceOptions", "tensors/tensor", also=("op", "timeout"), first=_prepared_all_reduce)
    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        """All-reduce in place; results are bitwise equal on all ranks."""
        return self._reduce("all_reduce", "allreduce", single(tensors, "all_reduce"), None, opts)

    def _reduce(self, operation: str, gloo: str, tensor: torch.Tensor, root: int | None, opts: Any) -> Any:
        """Reduce into the root's tensor, or into every rank's tensor if root is None."""
        reduce_op, dtype, is_root = opts.reduceOp, tensor.dtype, root is None or root == self._own_rank
        kind = plain_op(reduce_op)
        description = describe_call(operation, dtype, tensor.shape, kind, root)
        device = self._carrier_of(tensor)
        reduction, factor = self._reduction_of(device, operation, dtype, reduce_op, kind)

        def run(collectives: Collectives, results: list[torch.Tensor], terms: Terms) -> None:
            result = results[0] if factor is None else scaled(results[0], factor)
            collectives.reduce(result, root, reduction, terms)
            if result is not results[0] and is_root:
                results[0].copy_(result)

        written = [tensor] if is_root else []
        return self._launch(device, opts, description, run, (gloo, [tensor]), [tensor], [tensor], written)

    @takes("AllreduceCoalescedOptions", "tensors")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        """All-reduce several tensors, one after the other."""
        check_disjoint("all_reduce_coalesced", tensors)
        opts, seen = _of_one(opts), set()
        parts = []
        for tensor in tensors:
            # A tensor that is listed twice is reduced once; its second entry is replaced by a copy.
            parts.append(tensor.clone() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        return self._all_of("allreduce", [([part],) for part in parts], opts, list(tensors))

    @takes("ReduceOptions", "tensors/tensor", also=("root", "op", "timeout"))
    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """Reduce into the root's tensor; the tensors of other ranks stay unchanged."""
        root = root_of("reduce", opts, self._num_ranks)
        return self._reduce("reduce", "reduce", single(tensors, "reduce"), root, opts)

    @takes(
        "ReduceScatterOptions",
        "output_tensors/output",
        "input_tensors/input_tensor/input",
        also=("op", "timeout"),
    )
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Reduce ``inputs[r]`` of all ranks into rank r's output."""
        output, parts = single(outputs, "reduce_scatter"), lists(inputs)
        return self._reduce_scatter("reduce_scatter", output, parts, opts, ("reduce_scatter", [output], [parts]))

    @takes("ReduceScatterOptions", "outputTensor", "inputTensor", first=_prepared_reduce_scatter)
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Reduce a tensor and store its r-th part in rank r's output."""
        gloo = ("reduce_scatter_single", output, tensor)
        return self._reduce_scatter("reduce_scatter_tensor", output, [tensor], opts, gloo)

    def _reduce_scatter(
        self, operation: str, output: torch.Tensor, sources: list[torch.Tensor], opts: Any, gloo: GlooCall
    ) -> Any:
        """Reduce-scatter `sources`, a list with one tensor for each rank or one tensor to be split into equal parts."""
        in_one, kind = operation == "reduce_scatter_tensor", plain_op(opts.reduceOp)
        device = self._carrier_of(output, *sources)
        if device is not None:
            num_sources, num_parts = (1, self._num_ranks) if in_one else (self._num_ranks, 1)
            check_same(operation, sources, num_sources, output.dtype, output.numel() * num_parts)
        description = describe_call(operation, output.dtype, output.shape, kind)
        reduction, factor = self._reduction_of(device, "reduce_scatter", output.dtype, opts.reduceOp, kind)

        def run(collectives: Collectives, results: list[torch.Tensor], terms: Terms) -> None:
            parts = [flat(source) for source in sources]
            if factor is not None:
                parts = [scaled(part, factor) for part in parts]
            if in_one:
                parts = equal_parts(parts[0], self._num_ranks)
            collectives.reduce_scatter(parts, results[0], reduction, terms)

        return self._launch(device, opts, description, run, gloo, [output, *sources], [output])

    @takes("ReduceScatterOptions", "outputs/outputTensors", "inputs/inputTensors")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Reduce-scatter several tensors, each from one tensor."""
        check_pairs("reduce_scatter_tensor_coalesced", outputs, inputs)
        return self._all_of("reduce_scatter_single", zip(outputs, inputs, strict=True), opts, list(outputs))

    @takes("BarrierOptions", also=("timeout",))
    def barrier(self, opts: Any) -> Any:
        """Return once every rank has called this."""
        description = describe_call("barrier")
        return self._launch(HOST, opts, description, lambda group, _, terms: group.barrier(terms), (), [], [])

    # Collectives that only move data.

    @takes("BroadcastOptions", "tensors/tensor", also=("root", "timeout"))
    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        """Broadcast the root's tensor."""
        tensor, root = single(tensors, "broadcast"), root_of("broadcast", opts, self._num_ranks)
        is_root = root == self._own_rank
        description = describe_call("broadcast", tensor.dtype, tensor.shape, root=root)
        device = self._carrier_of(tensor)

        def run(collectives: Collectives, results: list[torch.Tensor], terms: Terms) -> None:
            collectives.broadcast(results[0], root, terms)

        gloo = ("broadcast", [tensor])
        return self._launch(device, opts, description, run, gloo, [tensor], [tensor], [] if is_root else [tensor])

    @takes("AllgatherOptions", "output_tensors", "input_tensors/input_tensor", also=("timeout",))
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gather every rank's tensor into a list on every rank."""
        tensor, targets = single(inputs, "all_gather"), lists(outputs)
        return self._gather("all_gather", targets, tensor, None, opts, ("allgather", [targets], [tensor]))

    def _gather(
        self, operation: str, outputs: Tensors, tensor: torch.Tensor, root: int | None, opts: Any, gloo: GlooCall
    ) -> Any:
        """Gather to the root, or to all ranks if root is None, into a list or into the equal parts of one tensor."""
        in_one, count, is_root = operation == "all_gather_into_tensor", self._num_ranks, root in (None, self._own_rank)
        device = self._carrier_of(tensor, *outputs)
        if is_root and device is not None:
            num_outputs, num_parts = (1, count) if in_one else (count, 1)
            check_same(operation, outputs, num_outputs, tensor.dtype, tensor.numel() * num_parts)
        description = describe_call(operation, tensor.dtype, tensor.shape, root=root)

        def run(collectives: Collectives, results: list[torch.Tensor], terms: Terms) -> None:
            parts = equal_parts(results[0], count) if in_one else results
            collectives.gather(flat(tensor), parts if is_root else None, root, terms)

        results, written = list(outputs) or [tensor], outputs if is_root else []
        return self._launch(device, opts, description, run, gloo, [*outputs, tensor], results, written)

    @takes("AllgatherOptions", "output_lists", "input_list")
    def allgather_coalesced(self, output_lists: Any, inputs: Tensors, opts: Any) -> Any:
        """All-gather several tensors; ``output_lists[r][i]`` receives rank r's ``inputs[i]``."""
        wrong = len(output_lists) != self._num_ranks or any(len(outs) != len(inputs) for outs in output_lists)
        if wrong:
            raise ValueError(
                f"all_gather_coalesced got lists of {[len(outs) for outs in output_lists]} outputs for {len(inputs)} inputs; "
                f"pass one list for each of the {self._num_ranks} ranks, with one output for each input."
            )
        calls = [([outs], [tensor]) for *outs, tensor in zip(*output_lists, inputs, strict=True)]
        return self._all_of("allgather", calls, opts, [tensor for outs in output_lists for tensor in outs])

    @takes("AllgatherOptions", "output", "input", first=_prepared_all_gather)
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Gather every rank's tensor into one tensor, in rank order."""
        gloo = ("all_gather_single", output, tensor)
        return self._gather("all_gather_into_tensor", [output], tensor, None, opts, gloo)

    @takes("AllgatherOptions", "outputs/output_lists", "inputs/input_list")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """All-gather several tensors, each into one tensor."""
        check_pairs("all_gather_into_tensor_coalesced", outputs, inputs)
        return self._all_of("all_gather_single", zip(outputs, inputs, strict=True), opts, list(outputs))

    @takes("GatherOptions", "output_tensors", "input_tensors/input_tensor", also=("root", "timeout"))
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gather every rank's tensor into a list on the root."""
        tensor, root = single(inputs, "gather"), root_of("gather", opts, self._num_ranks)
        targets = lists(outputs) if outputs else []
        gloo = ("gather", [targets] if root == self._own_rank else [], [tensor])
        return self._gather("gather", targets, tensor, root, opts, gloo)

    @takes("ScatterOptions", "output_tensors/output_tensor", "input_tensors", also=("root", "timeout"))
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Scatter the root's list of tensors: ``inputs[r]`` goes to rank r."""
        output, root = single(outputs, "scatter"), root_of("scatter", opts, self._num_ranks)
        parts = lists(inputs) if inputs else []
        is_root = root == self._own_rank
        device = self._carrier_of(output, *parts)
        if is_root and device is not None:
            check_same("scatter", parts, self._num_ranks, output.dtype, output.numel())
        description = describe_call("scatter", output.dtype, output.shape, root=root)

        def run(collectives: Collectives, results: list[torch.Tensor], terms: Terms) -> None:
            sources = [flat(part) for part in parts] if is_root else [None] * self._num_ranks
            targets = [results[0] if r == root else None for r in range(self._num_ranks)]
            collectives.exchange(sources, targets, results[0].nbytes, terms)

        gloo = ("scatter", [output], [parts] if is_root else [])
        return self._launch(device, opts, description, run, gloo, [output, *parts], [output])

    @takes(
        "AllToAllOptions", "output_tensors/output_tensor/output", "input_tensors/input_tensor/input", also=("timeout",)
    )
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it; sizes may differ by pair."""
        outputs, inputs = list(outputs), list(inputs)
        check_one_type("all_to_all", [*outputs, *inputs])
        device = self._carrier_of(*outputs, *inputs)
        for name, tensors in (("outputs", outputs), ("inputs", inputs)):
            if len(tensors) != self._num_ranks and device is not None:
                raise ValueError(
                    f"all_to_all got {len(tensors)} {name} for {self._num_ranks} ranks; pass one for each."
                )
        description = describe_call("all_to_all", inputs[0].dtype if inputs else None)

        def run(collectives: Collectives, results: list[torch.Tensor], terms: Terms) -> None:
            self._exchange(collectives, [flat(t) for t in inputs], results, terms)

        gloo = ("all_to_all", outputs, inputs)
        return self._launch(device, opts, description, run, gloo, [*outputs, *inputs], outputs)

    @takes(
        "AllToAllOptions",
        "output/output_tensor",
        "input/input_tensor",
        "output_split_sizes",
        "input_split_sizes",
        also=("timeout",),
    )
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> Any:
        """Send rows of `tensor` to each rank and receive rows of `output`; empty splits mean equal parts."""
        operation = "all_to_all_single"
        check_one_type(operation, [output, tensor])
        device = self._carrier_of(output, tensor)
        description = describe_call(operation, tensor.dtype)

        def run(collectives: Collectives, results: list[torch.Tensor], terms: Terms) -> None:
            sources = split_parts(operation, flat(tensor).view(tensor.shape), input_splits, self._num_ranks)
            targets = split_parts(operation, results[0].view(output.shape), output_splits, self._num_ranks)
            self._exchange(collectives, sources, targets, terms)

        gloo = ("all_to_all_single", output, tensor, list(output_splits), list(input_splits))
        return self._launch(device, opts, description, run, gloo, [output, tensor], [output])

    def _exchange(self, collectives: Collectives, inputs: Tensors, outputs: Tensors, terms: Terms) -> None:
        """All-to-all of parts of any size: exchange the sizes through the host first, then the data."""
        collectives.exchange(inputs, outputs, self._exchange_sizes(inputs, outputs, terms), terms)

    def _exchange_sizes(self, inputs: Tensors, outputs: Tensors, terms: Terms) -> int:
        """Return the bytes of the largest part of all ranks, after a check that senders' and receivers' sizes agree."""
        size = self._num_ranks
        own = torch.tensor([t.numel() * t.element_size() for t in (*inputs, *outputs)], dtype=torch.int64, device=HOST)
        table = torch.empty((size, 2 * size), dtype=torch.int64, device=HOST)
        self._host.gather(own, list(table), None, terms)
        sent, expected = table[:, :size], table[:, size:].t()
        wrong = (sent != expected).nonzero()
        if wrong.numel():
            # Every rank has the same table, so every rank raises the same here.
            source, target = wrong[0].tolist()
            names = self._names
            reason = (
                f"{description_text(terms.description)}: {names[source]} sends {int(sent[source, target])} bytes to "
                f"{names[target]}, which expects {int(expected[source, target])}; pass matching split sizes on both ranks."
            )
            self._host.fail(reason)
            raise CollectiveMismatchError(reason)
        return int(sent.max())

    # Point to point. Gloo matches these by rank and tag, independent of the order of the collectives.

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """Send to one rank. For a tensor on an accelerator, block until it is copied to the host."""
        tensor = single(tensors, "send")
        check_class(tensor)
        return self._gloo.send([tensor if tensor.is_cpu else tensor.detach().contiguous().cpu()], dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        """Receive from one rank. A tensor on an accelerator contains the data only after ``wait()`` of the Work."""
        return self._receive(single(tensors, "recv"), lambda targets: self._gloo.recv(targets, srcRank, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from any rank; otherwise like `recv`."""
        return self._receive(single(tensors, "recv"), lambda targets: self._gloo.recv_anysource(targets, tag))

    def _receive(self, tensor: torch.Tensor, receive: Callable[[list[torch.Tensor]], Any]) -> Any:
        check_class(tensor)
        if tensor.is_cpu:
            return receive([tensor])
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST)
        return ReceiveWork(receive([host]), host, tensor)

    # Names before torch 2.13; torch's C++ looks for either set.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def in_host_memory(*tensors: torch.Tensor) -> bool:
    """Return whether shared host memory can carry these tensors: on the CPU, dense, not quantized, no wrapper class."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if type(tensor) not in PLAIN and (is_without_data(tensor) or is_wrapper(tensor)):
            return False
    return True


def _in_inference_mode(function: Callable[[], None]) -> Callable[[], None]:
    """Wrap a function that writes inference tensors, which is allowed only in inference_mode of the running thread."""

    def guarded() -> None:
        with torch.inference_mode():
            function()

    return guarded


def _of_one(opts: Any) -> Any:
    """Return the options of a coalesced all_reduce as options for one all_reduce."""
    made = c10d.AllreduceOptions()
    made.reduceOp, made.timeout = opts.reduceOp, opts.timeout
    if hasattr(made, "asyncOp"):  # since torch 2.8
        made.asyncOp = opts.asyncOp
    return made


def _unused(store: Any, size: int) -> Any:
    """Return a prefix of a group's store that no earlier group on the same store used, as under torchrun.

    The ranks count arrivals: no rank finishes the set-up of one group, and can start the next, before all have arrived.
    """
    return PrefixStore(f"ipc/{(store.add('ipc/arrivals', 1) - 1) // size}", store)


def _meet(store: Any, rank: int, names: Sequence[str], timeout: timedelta) -> None:
    """Return when all ranks have come, each as late as the group's limit allows; the store's own limit may be shorter.

    Raises:
        CollectiveTimeoutError: Some ranks did not come.
    """
    keys = [f"here/{other}" for other in range(len(names))]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        if late := [name for name, key in zip(names, keys, strict=True) if not store.check([key])]:
            raise CollectiveTimeoutError(
                f"{', '.join(late)} did not create the process group within {timeout}. Look there first."
            ) from error
