"""Every collective of the ``ipc`` process group, under all names that torch 2.4 to 2.15 call. Imports torch.

Each method follows the one of `torch.distributed` of the same name. CPU tensors go through shared memory, all others
through the inner Gloo group. With ``asyncOp`` the call returns at once and the tensors belong to the backend until the
Work is waited for; otherwise it blocks until this rank's part is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arguments import as_options, check_same, equal_parts, lists, single, split_parts, timeout_of
from .description import describe_call
from .process_group import ProcessGroupBase, in_host_memory
from .reductions import plain_op, premul_factor
from .staging import Output, flat
from .torch_compat import c10d

Tensors = Sequence[torch.Tensor]


class IpcProcessGroup(ProcessGroupBase):
    """Process group of backend ``ipc``."""

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> Any:
        """All-reduce in place; results are bitwise equal on all ranks."""
        tensor, opts = single(tensors, "all_reduce"), as_options(c10d.AllreduceOptions, opts, timeout)
        kind = plain_op(opts.reduceOp)
        description = describe_call("all_reduce", tensor.dtype, tensor.shape, kind)
        if not in_host_memory(tensor):
            return self._through_gloo(opts, description, lambda: self._gloo.allreduce([tensor], opts), [tensor])
        reduction, factor = self._reduction_of("all_reduce", tensor.dtype, kind), premul_factor(opts.reduceOp, kind)
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            out = Output(tensor, load=True)
            self._collectives.all_reduce(out.flat, reduction, factor, description, timeout_s)
            out.store()

        return self._launch(opts, function, [tensor])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """All-reduce several tensors, one after the other."""
        opts = as_options(c10d.AllreduceOptions, opts)
        return self._all_of([self.allreduce([tensor], opts) for tensor in tensors], opts, list(tensors))

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> Any:
        """Broadcast the root's tensor."""
        tensor, opts = single(tensors, "broadcast"), as_options(c10d.BroadcastOptions, opts, timeout)
        root = opts.rootRank
        description = describe_call("broadcast", tensor.dtype, tensor.shape, root=root)
        if not in_host_memory(tensor):
            return self._through_gloo(opts, description, lambda: self._gloo.broadcast([tensor], opts), [tensor])
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            out = Output(tensor, load=True)
            self._collectives.broadcast(out.flat, root, description, timeout_s)
            if root != self._own_rank:
                out.store()

        return self._launch(opts, function, [tensor])

    def reduce(self, tensors: Tensors, opts: Any = None, *rest: Any) -> Any:
        """Reduce into the root's tensor; the others keep theirs."""
        tensor, opts = single(tensors, "reduce"), as_options(c10d.ReduceOptions, opts)
        root = opts.rootRank
        kind = plain_op(opts.reduceOp)
        description = describe_call("reduce", tensor.dtype, tensor.shape, kind, root)
        if not in_host_memory(tensor):
            return self._through_gloo(opts, description, lambda: self._gloo.reduce([tensor], opts), [tensor])
        reduction, factor = self._reduction_of("reduce", tensor.dtype, kind), premul_factor(opts.reduceOp, kind)
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            out = Output(tensor, load=True)
            self._collectives.reduce(out.flat, root, reduction, factor, description, timeout_s)
            if root == self._own_rank:
                out.store()

        return self._launch(opts, function, [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather every rank's tensor into a list on every rank."""
        tensor, targets = single(inputs, "all_gather"), lists(outputs)
        opts = as_options(c10d.AllgatherOptions, opts)
        description = describe_call("all_gather", tensor.dtype, tensor.shape)
        if not in_host_memory(tensor, *targets):
            return self._through_gloo(
                opts, description, lambda: self._gloo.allgather([targets], [tensor], opts), targets
            )
        check_same("all_gather", targets, self._num_ranks, tensor.dtype, tensor.numel())
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            outs = [Output(target) for target in targets]
            self._collectives.all_gather(flat(tensor), [out.flat for out in outs], description, timeout_s)
            for out in outs:
                out.store()

        return self._launch(opts, function, targets)

    def allgather_coalesced(self, output_lists: Any, inputs: Tensors, opts: Any = None) -> Any:
        """All-gather several tensors; ``output_lists[i]`` receives the gathered ``inputs[i]``."""
        opts = as_options(c10d.AllgatherOptions, opts)
        works = [self.allgather([outs], [tensor], opts) for outs, tensor in zip(output_lists, inputs, strict=True)]
        return self._all_of(works, opts, [tensor for outs in output_lists for tensor in outs])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Gather every rank's tensor into one tensor, by rank."""
        opts = as_options(c10d.AllgatherOptions, opts)
        description = describe_call("all_gather_into_tensor", tensor.dtype, tensor.shape)
        if not in_host_memory(output, tensor):
            return self._through_gloo(
                opts, description, lambda: self._gloo_base("all_gather", output, tensor, opts), [output]
            )
        check_same("all_gather_into_tensor", [output], 1, tensor.dtype, tensor.numel() * self._num_ranks)
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            out = Output(output)
            parts = equal_parts("all_gather_into_tensor", out.flat, self._num_ranks, tensor.numel())
            self._collectives.all_gather(flat(tensor), parts, description, timeout_s)
            out.store()

        return self._launch(opts, function, [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """All-gather several tensors, each into one tensor."""
        opts = as_options(c10d.AllgatherOptions, opts)
        works = [self.all_gather_single(out, tensor, opts) for out, tensor in zip(outputs, inputs, strict=True)]
        return self._all_of(works, opts, list(outputs))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        """Reduce ``inputs[r]`` of all ranks into rank r's output."""
        output, parts = single(outputs, "reduce_scatter"), lists(inputs)
        opts = as_options(c10d.ReduceScatterOptions, opts)
        description = describe_call("reduce_scatter", output.dtype, output.shape, plain_op(opts.reduceOp))
        if not in_host_memory(output, *parts):
            return self._through_gloo(
                opts, description, lambda: self._gloo.reduce_scatter([output], [parts], opts), [output]
            )
        check_same("reduce_scatter", parts, self._num_ranks, output.dtype, output.numel())
        return self._launch_reduce_scatter(opts, description, output, parts, None)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Reduce a tensor and leave its r-th part with rank r."""
        opts = as_options(c10d.ReduceScatterOptions, opts)
        description = describe_call("reduce_scatter_tensor", output.dtype, output.shape, plain_op(opts.reduceOp))
        if not in_host_memory(output, tensor):
            return self._through_gloo(
                opts, description, lambda: self._gloo_base("reduce_scatter", output, tensor, opts), [output]
            )
        check_same("reduce_scatter_tensor", [tensor], 1, output.dtype, output.numel() * self._num_ranks)
        return self._launch_reduce_scatter(opts, description, output, None, tensor)

    def _launch_reduce_scatter(
        self,
        opts: Any,
        description: bytes,
        output: torch.Tensor,
        parts: list[torch.Tensor] | None,
        whole: torch.Tensor | None,
    ) -> Any:
        kind = plain_op(opts.reduceOp)
        reduction, factor = self._reduction_of("reduce_scatter", output.dtype, kind), premul_factor(opts.reduceOp, kind)
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            out = Output(output)
            if whole is not None:
                inputs = equal_parts("reduce_scatter_tensor", flat(whole), self._num_ranks, output.numel())
            else:
                inputs = [flat(part) for part in parts or ()]
            self._collectives.reduce_scatter(inputs, out.flat, reduction, factor, description, timeout_s)
            out.store()

        return self._launch(opts, function, [output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Reduce-scatter several tensors, each from one tensor."""
        opts = as_options(c10d.ReduceScatterOptions, opts)
        works = [self.reduce_scatter_single(out, tensor, opts) for out, tensor in zip(outputs, inputs, strict=True)]
        return self._all_of(works, opts, list(outputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather every rank's tensor into a list on the root."""
        tensor, opts = single(inputs, "gather"), as_options(c10d.GatherOptions, opts)
        targets, root = lists(outputs) if outputs else [], opts.rootRank
        is_root = root == self._own_rank
        description = describe_call("gather", tensor.dtype, tensor.shape, root=root)
        if not in_host_memory(tensor, *targets):
            return self._through_gloo(
                opts, description, lambda: self._gloo.gather([targets] if is_root else [], [tensor], opts), targets
            )
        if is_root:
            check_same("gather", targets, self._num_ranks, tensor.dtype, tensor.numel())
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            outs = [Output(target) for target in targets] if is_root else None
            flats = [out.flat for out in outs] if outs else None
            self._collectives.gather(flat(tensor), flats, root, description, timeout_s)
            for out in outs or ():
                out.store()

        return self._launch(opts, function, targets or [tensor])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give each rank its tensor of the root's list."""
        output, opts = single(outputs, "scatter"), as_options(c10d.ScatterOptions, opts)
        parts = lists(inputs) if inputs else []
        root = opts.rootRank
        is_root = root == self._own_rank
        description = describe_call("scatter", output.dtype, output.shape, root=root)
        if not in_host_memory(output, *parts):
            return self._through_gloo(
                opts, description, lambda: self._gloo.scatter([output], [parts] if is_root else [], opts), [output]
            )
        if is_root:
            check_same("scatter", parts, self._num_ranks, output.dtype, output.numel())
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            out = Output(output)
            num_bytes = output.numel() * output.element_size()
            sources = [flat(part) for part in parts] if is_root else [None] * self._num_ranks
            targets = [out.flat if r == root else None for r in range(self._num_ranks)]
            self._collectives.exchange(sources, targets, num_bytes, description, timeout_s)
            out.store()

        return self._launch(opts, function, [output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it; sizes may differ by pair."""
        opts = as_options(c10d.AllToAllOptions, opts)
        outputs, inputs = list(outputs), list(inputs)
        dtype = inputs[0].dtype if inputs else None
        description = describe_call("all_to_all", dtype)
        if not in_host_memory(*outputs, *inputs):
            return self._through_gloo(opts, description, lambda: self._gloo_all_to_all(outputs, inputs, opts), outputs)
        for name, tensors in (("outputs", outputs), ("inputs", inputs)):
            if len(tensors) != self._num_ranks:
                raise ValueError(f"all_to_all got {len(tensors)} {name} for {self._num_ranks} ranks; pass one each.")
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            outs = [Output(output) for output in outputs]
            self._exchange([flat(t) for t in inputs], [out.flat for out in outs], description, timeout_s)
            for out in outs:
                out.store()

        return self._launch(opts, function, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        """Send rows of `tensor` to each rank and receive rows of `output`; empty splits mean equal parts."""
        opts = as_options(c10d.AllToAllOptions, opts)
        description = describe_call("all_to_all_single", tensor.dtype)
        if not in_host_memory(output, tensor):
            return self._through_gloo(
                opts,
                description,
                lambda: self._gloo_base("all_to_all", output, tensor, list(output_splits), list(input_splits), opts),
                [output],
            )
        timeout_s = timeout_of(opts, self._timeout_s)

        def function() -> None:
            out = Output(output)
            name, count = "all_to_all_single", self._num_ranks
            sources = split_parts(name, flat(tensor).view(tensor.shape), input_splits, count)
            targets = split_parts(name, out.flat.view(output.shape), output_splits, count)
            self._exchange(sources, targets, description, timeout_s)
            out.store()

        return self._launch(opts, function, [output])

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Return once every rank has called this."""
        opts = as_options(c10d.BarrierOptions, opts, timeout)
        description, timeout_s = describe_call("barrier"), timeout_of(opts, self._timeout_s)
        return self._launch(opts, lambda: self._collectives.barrier(description, timeout_s), [])

    # Names of torch before 2.13; its C++ looks for either set.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
