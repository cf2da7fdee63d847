"""Choose the calls of a group that can use a prepared path, and keep what was prepared for them. Imports torch.

Only calls on plain tensors in host memory, which need nothing between the caller and the slots: no copy, no profiler record,
no dispatch mode. The first call of a kind uses the general path, which also checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._torch import RedOpType, dispatch_modes, profiler_enabled
from ..protocol.collectives import HostCollectives
from ..protocol.description import describe_call
from ..protocol.local import LocalCollectives
from ..protocol.prepared import PreparedCall, prepare
from ..protocol.reductions import Reduction, plain_op
from .observers import PLAIN

_MAX_SHAPES = 256


class PreparedCalls:
    """Prepared calls of one group.

    Args:
        reductions: The operations of the group's earlier calls, by element type and ``RedOpType``.
        timeout_s: Returns the time limit in seconds of a call with given options.
    """

    def __init__(
        self, reductions: Mapping[tuple[torch.dtype, Any], Reduction], timeout_s: Callable[[Any], float]
    ) -> None:
        self._reductions = reductions
        self._timeout_s = timeout_s
        # By operation, element type and shapes: each RedOpType, with None if such a call needs the general path.
        self._kinds: dict[tuple[Any, ...], list[tuple[Any, PreparedCall | None]]] = {}

    def find(
        self, host: HostCollectives, operation: str, output: torch.Tensor, source: torch.Tensor, reduce_op: Any
    ) -> tuple[PreparedCall, int, int] | None:
        """Return the prepared path of a call and the addresses of its tensors; None if it needs the general path.

        Args:
            host: Collectives of the group's CPU tensors.
            operation: As in `describe_call`.
            output: The tensor that receives the result.
            source: The input; may be `output`.
            reduce_op: torch's operation; None if the call only moves data.
        """
        if dispatch_modes() or profiler_enabled():
            return None
        address = to = _address(output)
        key: tuple[Any, ...] = operation, output.dtype, output.shape
        if source is not output:
            address = _address(source)
            key = *key, source.dtype, source.shape
        if not address or not to:
            return None
        kinds = self._kinds.get(key)
        if kinds is None:
            # Only the next call of this shape is prepared: some programs have another shape in each call.
            if len(self._kinds) >= _MAX_SHAPES:
                self._kinds.clear()
            self._kinds[key] = []
            return None
        # Not the operation as a key: hashing and comparing a ReduceOp takes as long as a small copy.
        for kind, prepared in kinds:
            if reduce_op == kind:
                call = prepared
                break
        else:
            kind = None if reduce_op is None else plain_op(reduce_op)
            reduction = self._reductions.get((output.dtype, kind))
            if reduction is None and kind is not None:
                return None
            call = self._prepare(host, operation, output, source, reduction, kind)
            kinds.append((kind, call))
        return None if call is None else (call, to, address)

    def _prepare(
        self,
        host: HostCollectives,
        operation: str,
        output: torch.Tensor,
        source: torch.Tensor,
        reduction: Reduction | None,
        kind: Any,
    ) -> PreparedCall | None:
        if not isinstance(host, LocalCollectives) or kind is RedOpType.PREMUL_SUM or output.is_complex():
            return None
        described = source if reduction is None else output
        description = describe_call(operation, described.dtype, described.shape, kind)
        num_parts = host.num_ranks if operation == "reduce_scatter_tensor" else 1
        return prepare(host, output, source, reduction, num_parts, description, self._timeout_s)

    def close(self) -> None:
        """Drop all prepared calls, which keep the shared memory mapped."""
        self._kinds.clear()


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a contiguous plain tensor in host memory; 0 for another one, also an empty one."""
    if type(tensor) not in PLAIN or not tensor.is_cpu:
        return 0
    try:
        address: int = tensor.data_ptr()
    except RuntimeError:  # a sparse tensor, or one in a transform of torch.func
        return 0
    return address if tensor.is_contiguous() and not tensor.is_neg() else 0
