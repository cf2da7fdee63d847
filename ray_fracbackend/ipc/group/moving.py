"""Collectives of the ``ipc`` process group that only move data. Imports torch; see `operations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..protocol.description import describe_call
from ..protocol.hierarchy import Collectives
from .arguments import check_one_type, check_same, equal_parts, lists, root_of, single, split_parts, timeout_of
from .forms import takes
from .launching import LaunchingGroup, Tensors
from .staging import Output, flat


class MovingGroup(LaunchingGroup):
    """Adds what moves data; `operations.IpcProcessGroup` adds what reduces it."""

    @takes("BroadcastOptions", "tensors/tensor", also=("root", "timeout"))
    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        """Broadcast the root's tensor."""
        tensor, root = single(tensors, "broadcast"), root_of("broadcast", opts, self._num_ranks)
        description = describe_call("broadcast", tensor.dtype, tensor.shape, root=root)

        def gloo() -> Any:
            return self._gloo.broadcast([tensor], opts)

        device = self._carrier_of(tensor)
        if device is None:
            return self._through_gloo(opts, description, gloo, [tensor], [tensor])
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            out = Output(tensor, load=True)
            collectives.broadcast(out.flat, root, description, timeout_s)
            if root != self._own_rank:
                out.store()

        written = [tensor] if root != self._own_rank else []
        return self._launch(device, opts, description, function, gloo, [tensor], [tensor], written)

    @takes("AllgatherOptions", "output_tensors", "input_tensors/input_tensor", also=("timeout",))
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gather every rank's tensor into a list on every rank."""
        tensor, targets = single(inputs, "all_gather"), lists(outputs)
        description = describe_call("all_gather", tensor.dtype, tensor.shape)

        def gloo() -> Any:
            return self._gloo.allgather([targets], [tensor], opts)

        device = self._carrier_of(tensor, *targets)
        if device is None:
            return self._through_gloo(opts, description, gloo, [tensor, *targets], targets)
        check_same("all_gather", targets, self._num_ranks, tensor.dtype, tensor.numel())
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            outs = [Output(target) for target in targets]
            collectives.all_gather(flat(tensor), [out.flat for out in outs], description, timeout_s)
            for out in outs:
                out.store()

        return self._launch(device, opts, description, function, gloo, [tensor, *targets], targets)

    @takes("AllgatherOptions", "output_lists", "input_list")
    def allgather_coalesced(self, output_lists: Any, inputs: Tensors, opts: Any) -> Any:
        """All-gather several tensors; ``output_lists[r][i]`` receives rank r's ``inputs[i]``."""
        wrong = len(output_lists) != self._num_ranks or any(len(outs) != len(inputs) for outs in output_lists)
        if wrong:
            raise ValueError(
                f"all_gather_coalesced got lists of {[len(outs) for outs in output_lists]} outputs for {len(inputs)} inputs; "
                f"pass one list for each of the {self._num_ranks} ranks, with one output for each input."
            )
        works = [
            self.allgather([list(outs)], [tensor], opts) for *outs, tensor in zip(*output_lists, inputs, strict=True)
        ]
        return self._all_of(works, opts, [tensor for outs in output_lists for tensor in outs])

    @takes("AllgatherOptions", "output", "input")
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Gather every rank's tensor into one tensor, by rank."""
        description = describe_call("all_gather_into_tensor", tensor.dtype, tensor.shape)

        def gloo() -> Any:
            return self._gloo_base("all_gather", output, tensor, opts)

        device = self._carrier_of(output, tensor)
        if device is None:
            return self._through_gloo(opts, description, gloo, [output, tensor], [output])
        check_same("all_gather_into_tensor", [output], 1, tensor.dtype, tensor.numel() * self._num_ranks)
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            out = Output(output)
            parts = equal_parts("all_gather_into_tensor", out.flat, self._num_ranks, tensor.numel())
            collectives.all_gather(flat(tensor), parts, description, timeout_s)
            out.store()

        return self._launch(device, opts, description, function, gloo, [output, tensor], [output])

    @takes("AllgatherOptions", "outputs/output_lists", "inputs/input_list")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """All-gather several tensors, each into one tensor."""
        works = [self.all_gather_single(out, tensor, opts) for out, tensor in zip(outputs, inputs, strict=True)]
        return self._all_of(works, opts, list(outputs))

    @takes("GatherOptions", "output_tensors", "input_tensors/input_tensor", also=("root", "timeout"))
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gather every rank's tensor into a list on the root."""
        tensor, root = single(inputs, "gather"), root_of("gather", opts, self._num_ranks)
        targets = lists(outputs) if outputs else []
        is_root = root == self._own_rank
        description = describe_call("gather", tensor.dtype, tensor.shape, root=root)

        def gloo() -> Any:
            return self._gloo.gather([targets] if is_root else [], [tensor], opts)

        device = self._carrier_of(tensor, *targets)
        if device is None:
            return self._through_gloo(opts, description, gloo, [tensor, *targets], targets)
        if is_root:
            check_same("gather", targets, self._num_ranks, tensor.dtype, tensor.numel())
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            outs = [Output(target) for target in targets] if is_root else None
            flats = [out.flat for out in outs] if outs else None
            collectives.gather(flat(tensor), flats, root, description, timeout_s)
            for out in outs or ():
                out.store()

        return self._launch(device, opts, description, function, gloo, [tensor, *targets], targets or [tensor], targets)

    @takes("ScatterOptions", "output_tensors/output_tensor", "input_tensors", also=("root", "timeout"))
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Give each rank its tensor of the root's list."""
        output, root = single(outputs, "scatter"), root_of("scatter", opts, self._num_ranks)
        parts = lists(inputs) if inputs else []
        is_root = root == self._own_rank
        description = describe_call("scatter", output.dtype, output.shape, root=root)

        def gloo() -> Any:
            return self._gloo.scatter([output], [parts] if is_root else [], opts)

        device = self._carrier_of(output, *parts)
        if device is None:
            return self._through_gloo(opts, description, gloo, [output, *parts], [output])
        if is_root:
            check_same("scatter", parts, self._num_ranks, output.dtype, output.numel())
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            out = Output(output)
            num_bytes = output.numel() * output.element_size()
            sources = [flat(part) for part in parts] if is_root else [None] * self._num_ranks
            targets = [out.flat if r == root else None for r in range(self._num_ranks)]
            collectives.exchange(sources, targets, num_bytes, description, timeout_s)
            out.store()

        return self._launch(device, opts, description, function, gloo, [output, *parts], [output])

    @takes(
        "AllToAllOptions", "output_tensors/output_tensor/output", "input_tensors/input_tensor/input", also=("timeout",)
    )
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it; sizes may differ by pair."""
        outputs, inputs = list(outputs), list(inputs)
        check_one_type("all_to_all", [*outputs, *inputs])
        dtype = inputs[0].dtype if inputs else None
        description = describe_call("all_to_all", dtype)

        def gloo() -> Any:
            return self._gloo_all_to_all(outputs, inputs, opts)

        device = self._carrier_of(*outputs, *inputs)
        if device is None:
            return self._through_gloo(opts, description, gloo, [*outputs, *inputs], outputs)
        for name, tensors in (("outputs", outputs), ("inputs", inputs)):
            if len(tensors) != self._num_ranks:
                raise ValueError(f"all_to_all got {len(tensors)} {name} for {self._num_ranks} ranks; pass one each.")
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            outs = [Output(output) for output in outputs]
            self._exchange(collectives, [flat(t) for t in inputs], [out.flat for out in outs], description, timeout_s)
            for out in outs:
                out.store()

        return self._launch(device, opts, description, function, gloo, [*outputs, *inputs], outputs)

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
        check_one_type("all_to_all_single", [output, tensor])
        description = describe_call("all_to_all_single", tensor.dtype)

        def gloo() -> Any:
            return self._gloo_base("all_to_all", output, tensor, list(output_splits), list(input_splits), opts)

        device = self._carrier_of(output, tensor)
        if device is None:
            return self._through_gloo(opts, description, gloo, [output, tensor], [output])
        timeout_s = timeout_of(opts, self._timeout_s)

        def function(collectives: Collectives) -> None:
            out = Output(output)
            name, count = "all_to_all_single", self._num_ranks
            sources = split_parts(name, flat(tensor).view(tensor.shape), input_splits, count)
            targets = split_parts(name, out.flat.view(output.shape), output_splits, count)
            self._exchange(collectives, sources, targets, description, timeout_s)
            out.store()

        return self._launch(device, opts, description, function, gloo, [output, tensor], [output])

    # Names of torch before 2.13; its C++ looks for either set.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
