"""Choose the calls of a group that can use a prepared path, and keep what was prepared for them. Imports torch.

Only synchronous calls on plain tensors in host memory, which need nothing between the caller and the slots: no copy, no
profiler record, no dispatch mode. The first call of a kind uses the general path, which also checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._torch import RedOpType, dispatch_modes, profiler_enabled
from ..protocol.collectives import HostCollectives
from ..protocol.description import describe_call
from ..protocol.local import LocalCollectives
from ..protocol.prepared import PreparedCall, prepare_all_reduce
from ..protocol.reductions import Reduction, plain_op
from .arguments import wants_async
from .observers import PLAIN

_MAX_SHAPES = 256


class SmallCalls:
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
        # By element type and shape: each RedOpType, with None if such a call needs the general path.
        self._kinds: dict[tuple[torch.dtype, torch.Size], list[tuple[Any, PreparedCall | None]]] = {}

    def all_reduce(self, host: HostCollectives, tensor: torch.Tensor, opts: Any) -> tuple[PreparedCall, int] | None:
        """Return the prepared path of an all_reduce and the address of the tensor; None if it needs the general path."""
        if type(tensor) not in PLAIN or wants_async(opts) or dispatch_modes() or profiler_enabled():
            return None
        if not tensor.is_cpu:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a sparse tensor, or one in a transform of torch.func
            return None
        # 0 for an empty tensor, and for a tensor of zeros that has no memory.
        if not address or not tensor.is_contiguous() or tensor.is_neg():
            return None
        reduce_op, kinds = opts.reduceOp, self._kinds.get((tensor.dtype, tensor.shape))
        if kinds is None:
            # Only the next call of this shape is prepared: some programs have another shape in each call.
            if len(self._kinds) >= _MAX_SHAPES:
                self._kinds.clear()
            self._kinds[tensor.dtype, tensor.shape] = []
            return None
        # Not the operation as a key: hashing and comparing a ReduceOp takes as long as a small copy.
        for kind, prepared in kinds:
            if reduce_op == kind:
                call = prepared
                break
        else:
            kind = plain_op(reduce_op)
            reduction = self._reductions.get((tensor.dtype, kind))
            if reduction is None:
                return None
            call = self._prepare(host, tensor, reduction, kind)
            kinds.append((kind, call))
        return None if call is None else (call, address)

    def _prepare(
        self, host: HostCollectives, tensor: torch.Tensor, reduction: Reduction, kind: Any
    ) -> PreparedCall | None:
        if not isinstance(host, LocalCollectives) or kind is RedOpType.PREMUL_SUM or tensor.is_complex():
            return None
        description = describe_call("all_reduce", tensor.dtype, tensor.shape, kind)
        return prepare_all_reduce(host, tensor, reduction, description, self._timeout_s)

    def close(self) -> None:
        """Drop all prepared calls, which keep the shared memory mapped."""
        self._kinds.clear()
