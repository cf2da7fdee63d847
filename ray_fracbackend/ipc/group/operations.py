"""Every collective of the ``ipc`` process group, under all names that torch 2.7 to 2.15 call. Imports torch.

Each method follows the one of `torch.distributed` of the same name. Dense CPU tensors go through shared host memory,
those on the group's CUDA device through device memory, all others through the inner Gloo group. With ``asyncOp`` the call
returns at once and the tensors belong to the backend until the Work is waited for; otherwise it blocks until this rank's
part is done, on a device until it has been issued and the caller's stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch import c10d
from ..protocol.description import describe_call
from ..protocol.hierarchy import Collectives
from ..protocol.reductions import plain_op, premul_factor
from .arguments import check_disjoint, check_same, equal_parts, lists, root_of, single, timeout_of
from .forms import takes
from .launching import Tensors
from .moving import MovingGroup
from .staging import Output, flat


class IpcProcessGroup(MovingGroup):
    """Process group of backend ``ipc``."""

    @takes("AllreduceOptions", "tensors/tensor", also=("op", "timeout"))
    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        """All-reduce in place; results are bitwise equal on all ranks."""
        tensor = single(tensors, "all_reduce")
        kind = plain_op(opts.reduceOp)
        description = describe_call("all_reduce", tensor.dtype, tensor.shape, kind)

        def gloo() -> Any:
            return self._gloo.allreduce([tensor], opts)

        device = self._carrier_of(tensor)
        if device is None:
            return self._through_gloo(opts, description, gloo, [tensor], [tensor])
        reduction, factor = self._reduction_of("all_reduce", tensor.dtype, kind), premul_factor(opts.reduceOp, kind)
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            out = Output(tensor, load=True)
            collectives.all_reduce(out.flat, reduction, factor, description, timeout_s)
            out.store()

        return self._launch(device, opts, description, function, gloo, [tensor], [tensor])

    @takes("AllreduceCoalescedOptions", "tensors")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        """All-reduce several tensors, one after the other."""
        check_disjoint("all_reduce_coalesced", tensors)
        opts, seen = _of_one(opts), set()
        parts = []
        for tensor in tensors:
            # A tensor that is listed twice is reduced once, and its second place takes part with a copy.
            parts.append(tensor.clone() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        return self._all_of([self.allreduce([part], opts) for part in parts], opts, list(tensors))

    @takes("ReduceOptions", "tensors/tensor", also=("root", "op", "timeout"))
    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """Reduce into the root's tensor; the others keep theirs."""
        tensor, root = single(tensors, "reduce"), root_of("reduce", opts, self._num_ranks)
        kind = plain_op(opts.reduceOp)
        description = describe_call("reduce", tensor.dtype, tensor.shape, kind, root)

        def gloo() -> Any:
            return self._gloo.reduce([tensor], opts)

        device = self._carrier_of(tensor)
        if device is None:
            return self._through_gloo(opts, description, gloo, [tensor], [tensor])
        reduction, factor = self._reduction_of("reduce", tensor.dtype, kind), premul_factor(opts.reduceOp, kind)
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            out = Output(tensor, load=True)
            collectives.reduce(out.flat, root, reduction, factor, description, timeout_s)
            if root == self._own_rank:
                out.store()

        written = [tensor] if root == self._own_rank else []
        return self._launch(device, opts, description, function, gloo, [tensor], [tensor], written)

    @takes(
        "ReduceScatterOptions",
        "output_tensors/output",
        "input_tensors/input_tensor/input",
        also=("op", "timeout"),
    )
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Reduce ``inputs[r]`` of all ranks into rank r's output."""
        output, parts = single(outputs, "reduce_scatter"), lists(inputs)
        description = describe_call("reduce_scatter", output.dtype, output.shape, plain_op(opts.reduceOp))

        def gloo() -> Any:
            return self._gloo.reduce_scatter([output], [parts], opts)

        device = self._carrier_of(output, *parts)
        if device is None:
            return self._through_gloo(opts, description, gloo, [output, *parts], [output])
        check_same("reduce_scatter", parts, self._num_ranks, output.dtype, output.numel())
        return self._launch_reduce_scatter(device, opts, description, gloo, output, parts)

    @takes("ReduceScatterOptions", "outputTensor", "inputTensor")
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Reduce a tensor and leave its r-th part with rank r."""
        description = describe_call("reduce_scatter_tensor", output.dtype, output.shape, plain_op(opts.reduceOp))

        def gloo() -> Any:
            return self._gloo_base("reduce_scatter", output, tensor, opts)

        device = self._carrier_of(output, tensor)
        if device is None:
            return self._through_gloo(opts, description, gloo, [output, tensor], [output])
        check_same("reduce_scatter_tensor", [tensor], 1, output.dtype, output.numel() * self._num_ranks)
        return self._launch_reduce_scatter(device, opts, description, gloo, output, tensor)

    def _launch_reduce_scatter(
        self,
        device: torch.device,
        opts: Any,
        description: bytes,
        gloo: Callable[[], Any],
        output: torch.Tensor,
        source: torch.Tensor | list[torch.Tensor],
    ) -> Any:
        kind = plain_op(opts.reduceOp)
        reduction, factor = self._reduction_of("reduce_scatter", output.dtype, kind), premul_factor(opts.reduceOp, kind)
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            out = Output(output)
            if isinstance(source, torch.Tensor):
                inputs = equal_parts("reduce_scatter_tensor", flat(source), self._num_ranks, output.numel())
            else:
                inputs = [flat(part) for part in source]
            collectives.reduce_scatter(inputs, out.flat, reduction, factor, description, timeout_s)
            out.store()

        tensors = [output, source] if isinstance(source, torch.Tensor) else [output, *source]
        return self._launch(device, opts, description, function, gloo, tensors, [output])

    @takes("ReduceScatterOptions", "outputs/outputTensors", "inputs/inputTensors")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Reduce-scatter several tensors, each from one tensor."""
        works = [self.reduce_scatter_single(out, tensor, opts) for out, tensor in zip(outputs, inputs, strict=True)]
        return self._all_of(works, opts, list(outputs))

    @takes("BarrierOptions", also=("timeout",))
    def barrier(self, opts: Any) -> Any:
        """Return once every rank has called this."""
        description, timeout_s = describe_call("barrier"), timeout_of(opts, self._timeout_s)
        function = self._begun(description, (), self._guarded(self._collectives.barrier, description, timeout_s))
        return self._execute(opts, function, [])

    # As in `moving`.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _of_one(opts: Any) -> Any:
    """The options of a coalesced all_reduce for one of its tensors."""
    made = c10d.AllreduceOptions()
    made.reduceOp, made.timeout = opts.reduceOp, opts.timeout
    if hasattr(made, "asyncOp"):  # since torch 2.8
        made.asyncOp = opts.asyncOp
    return made
