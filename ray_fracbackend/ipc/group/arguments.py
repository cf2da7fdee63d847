"""Checks what torch passes to a process group: options, roots, lists of tensors, splits. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch

from .._torch import no_torch_dispatch
from ..protocol.description import description_text
from .observers import PLAIN


def wants_async(opts: Any) -> bool:
    """Whether the caller goes on while the collective runs; True where torch does not say (before 2.8)."""
    return bool(getattr(opts, "asyncOp", True))


def timeout_of(opts: Any, default_s: float) -> float:
    """Seconds from an options object; torch writes -1 ms or 0 for "the group's own"."""
    timeout = getattr(opts, "timeout", None)
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        return timeout.total_seconds()
    return default_s


def root_of(operation: str, opts: Any, count: int) -> int:
    """The root of a call.

    Raises:
        ValueError: It is no rank of the group, or not of its first tensor.
    """
    root: int = opts.rootRank
    if not 0 <= root < count:
        raise ValueError(f"{operation} got an invalid root rank: {root}; the group has ranks 0 to {count - 1}.")
    if getattr(opts, "rootTensor", 0) != 0:
        raise ValueError(f"{operation} got an invalid root tensor: {opts.rootTensor}; there is one, number 0.")
    return root


def single(tensors: torch.Tensor | Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    """The one tensor of a list of one.

    Raises:
        ValueError: There is not exactly one.
    """
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{operation} got {len(tensors)} tensors; the ipc backend takes one per rank and call.")
    return tensors[0]


def lists(tensors: Any) -> list[torch.Tensor]:
    """The inner list of a list of one list, or a flat list itself."""
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list(tensors[0])
    return list(tensors)


def check_same(operation: str, tensors: Sequence[torch.Tensor], count: int, dtype: torch.dtype, numel: int) -> None:
    """Check a list of equal parts.

    Raises:
        ValueError: The number of tensors, an element type or a size is wrong.
    """
    if len(tensors) != count:
        raise ValueError(f"{operation} got {len(tensors)} tensors for {count} ranks; pass one for each rank.")
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.numel() != numel:
            raise ValueError(
                f"{operation} got a part of {tensor.dtype}[{tensor.numel()}] where {dtype}[{numel}] belongs; all parts "
                f"must have one element type and size."
            )


def check_one_type(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check tensors of any size.

    Raises:
        ValueError: Their element types differ.
    """
    types = dict.fromkeys(tensor.dtype for tensor in tensors)
    if len(types) > 1:
        raise ValueError(f"{operation} got tensors of {' and '.join(map(str, types))}; all must have one element type.")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others, and would see each copy of a collective: a DTensor, for one."""
    kind = type(tensor)
    dispatch = getattr(kind, "__torch_dispatch__", no_torch_dispatch)
    # AsyncCollectiveTensor, from functional collectives, waits and unwraps itself, whatever is done with it.
    return dispatch is not no_torch_dispatch and kind.__name__ not in ("FakeTensor", "AsyncCollectiveTensor")


def check_class(tensor: torch.Tensor) -> None:
    """Check that a tensor is its own data.

    Raises:
        TypeError: It wraps others.
    """
    if is_wrapper(tensor):
        raise TypeError(
            f"A collective got a {type(tensor).__name__}, which wraps other tensors; pass what it wraps, such as .to_local() of a "
            "DTensor."
        )


def check_writable(description: bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Check tensors that receive results.

    Raises:
        ValueError: Elements of one share memory, as after ``expand``: which value would stay there is undefined.
    """
    for tensor in tensors:
        if not tensor.is_contiguous() and 0 in tensor.stride() and torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"{description_text(description)} would write to a tensor whose elements share memory (strides "
                f"{tensor.stride()}); pass a tensor with memory of its own, such as .contiguous() gives."
            )


def check_disjoint(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check tensors that are reduced one after the other.

    Raises:
        ValueError: Two of them, both contiguous, share memory, which would be reduced twice.
    """
    plain = [
        t for t in tensors if type(t) in PLAIN and t.layout is torch.strided and t.is_contiguous() and not t.is_meta
    ]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, id(t)) for t in plain)
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end and first != second:
            raise ValueError(
                f"{operation} got two tensors that share memory, which would be reduced twice; pass each part of memory once."
            )


def equal_parts(operation: str, tensor: torch.Tensor, count: int, part_numel: int) -> list[torch.Tensor]:
    """Split a 1-D tensor into `count` parts of `part_numel` elements.

    Raises:
        ValueError: The sizes do not fit.
    """
    if tensor.numel() != count * part_numel:
        raise ValueError(
            f"{operation} got {tensor.numel()} elements where {count} ranks times {part_numel} belong; make the larger "
            f"tensor exactly that size."
        )
    return [tensor[r * part_numel : (r + 1) * part_numel] for r in range(count)]


def split_parts(operation: str, tensor: torch.Tensor, splits: Sequence[int], count: int) -> list[torch.Tensor]:
    """Split a tensor's flat memory by rows as all_to_all_single does; empty `splits` mean equal parts.

    Args:
        operation: For messages.
        tensor: Contiguous, any shape.
        splits: Rows of dimension 0 for each rank.
        count: Ranks.

    Raises:
        ValueError: The splits do not cover dimension 0 exactly, or it cannot be divided evenly.
    """
    rows = tensor.shape[0] if tensor.dim() else tensor.numel()
    if not splits:
        if rows % count:
            raise ValueError(f"{operation}: dimension 0 has {rows} rows for {count} ranks; pass split sizes.")
        splits = [rows // count] * count
    if len(splits) != count or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"{operation}: splits {list(splits)} do not cover {rows} rows for {count} ranks.")
    row_numel = tensor.numel() // rows if rows else 0
    return list(tensor.view(-1).split_with_sizes([rows_of * row_numel for rows_of in splits]))
