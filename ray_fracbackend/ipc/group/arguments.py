"""Read and check the arguments of a process group's methods, in every form that torch's groups accept. Imports torch.

torch's C++ and `torch.distributed` pass tensors and an options object. A caller may also pass root, reduce operation
and timeout as separate arguments, by position or by name (overloads of ``ProcessGroup`` in _distributed_c10d.pyi).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from inspect import Parameter, Signature
from itertools import pairwise
from typing import Any, TypeVar

import torch

from .._torch import active_transform, c10d, no_torch_dispatch
from ..protocol.description import description_text
from .observers import PLAIN, outside_transforms

_Method = TypeVar("_Method", bound=Callable[..., Any])
_NO_TIME = timedelta(0)
# Field of the options object for each argument that may be passed separately.
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def takes(
    options: str, *tensors: str, also: Sequence[str] = (), first: Callable[..., Any] | None = None
) -> Callable[[_Method], _Method]:
    """Decorate a method of ``(self, *tensors, opts)`` so that it can be called in torch's other forms.

    Args:
        options: Class of the options, such as ``AllreduceOptions``.
        tensors: Names of the arguments before the options; alternatives with ``/`` between them.
        also: Arguments that may replace the options, in torch's order: some of ``root``, ``op`` and ``timeout``.
            ``root`` has no default.
        first: Method that is tried first if the call has this form. It makes the call and returns its Work, or returns
            None and does nothing.

    Returns:
        A decorator. The undecorated method checks a call and returns a function that starts it; the decorated method
        starts the call at once. It raises TypeError if the arguments match none of the forms.
    """
    kind = getattr(c10d, options)
    names = [name.split("/") for name in tensors]

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if active_transform() is not None:
                return outside_transforms(call, (self, *args), kwargs)
            if not kwargs and len(args) == len(names) + 1 and isinstance(args[-1], kind):
                if first is not None:
                    work = first(self, *args)
                    if work is not None:
                        return work
                return method(self, *args)()
            return method(self, *_read(method.__name__, kind, names, also, args, kwargs))()

        return call  # type: ignore[return-value]

    return decorate


def _read(
    method: str,
    kind: type[Any],
    names: list[list[str]],
    also: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """Return the tensors and options of a call."""
    first_names = {name: alternatives[0] for alternatives in names for name in alternatives}
    given = {first_names.get(name, name): value for name, value in kwargs.items()}
    rest = args[len(names) :]
    has_opts = isinstance(rest[0], (kind, type(None))) if rest else not any(name in given for name in also)
    parameters = [Parameter(alternatives[0], Parameter.POSITIONAL_OR_KEYWORD) for alternatives in names]
    for name in ("opts",) if has_opts else also:
        default = Parameter.empty if name == "root" else None
        parameters.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default))
    try:
        bound = Signature(parameters).bind(*args, **given)
    except TypeError as error:
        raise TypeError(f"{method}(): {error}") from None
    bound.apply_defaults()
    *found, opts = bound.args if has_opts else (*bound.args[: len(names)], None)
    if not isinstance(opts, (kind, type(None))):
        raise TypeError(f"{method}(): opts must be {kind.__name__}, got {opts!r}")
    opts = kind() if opts is None else opts
    for name in () if has_opts else also:
        if (value := bound.arguments[name]) is not None:
            setattr(opts, _FIELDS[name], value)  # torch checks its type
    return [*found, opts]


def wants_async(opts: Any) -> bool:
    """Return whether the call is asynchronous; True for torch before 2.8, whose options do not have this field."""
    is_async: bool = getattr(opts, "asyncOp", True)
    return is_async


def timeout_of(opts: Any, default_s: float) -> float:
    """Return the timeout of an options object in seconds; -1 ms and 0 mean the group's default, as in torch."""
    timeout = getattr(opts, "timeout", None)
    if isinstance(timeout, timedelta) and timeout > _NO_TIME:
        return timeout.total_seconds()
    return default_s


def root_of(operation: str, opts: Any, count: int) -> int:
    """Return the root of a call.

    Raises:
        ValueError: The root is not a rank of the group, or the root tensor is not number 0.
    """
    root: int = opts.rootRank
    if not 0 <= root < count:
        raise ValueError(f"{operation} got an invalid root rank: {root}; the group has ranks 0 to {count - 1}.")
    if getattr(opts, "rootTensor", 0) != 0:
        raise ValueError(f"{operation} got an invalid root tensor: {opts.rootTensor}; it must be 0.")
    return root


def single(tensors: torch.Tensor | Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    """Return the one tensor of a list of one.

    Raises:
        ValueError: There is not exactly one.
    """
    # The list first, because isinstance takes longer for a class of torch.
    if type(tensors) is not list and isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{operation} got {len(tensors)} tensors; this backend accepts one per rank and call.")
    return tensors[0]


def lists(tensors: Any) -> list[torch.Tensor]:
    """Return the inner list of a list of one list, or a flat list itself."""
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list(tensors[0])
    return list(tensors)


def check_same(operation: str, tensors: Sequence[torch.Tensor], count: int, dtype: torch.dtype, numel: int) -> None:
    """Check a list of equal parts.

    Raises:
        ValueError: The number of tensors, a dtype or a size is wrong.
    """
    if len(tensors) != count:
        raise ValueError(f"{operation} got {len(tensors)} tensors for {count} ranks; pass one for each rank.")
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.numel() != numel:
            raise ValueError(
                f"{operation} got a part of {tensor.dtype}[{tensor.numel()}] but expects {dtype}[{numel}]; all parts "
                f"must have the same dtype and size."
            )


def check_one_type(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check tensors of any size.

    Raises:
        ValueError: Their dtypes differ.
    """
    types = dict.fromkeys(tensor.dtype for tensor in tensors)
    if len(types) > 1:
        raise ValueError(f"{operation} got tensors of {' and '.join(map(str, types))}; all must have the same dtype.")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor wraps others, such as a DTensor, which would intercept each copy of a collective."""
    kind = type(tensor)
    dispatch = getattr(kind, "__torch_dispatch__", no_torch_dispatch)
    # AsyncCollectiveTensor, from functional collectives, waits and unwraps itself in every operation.
    return dispatch is not no_torch_dispatch and kind.__name__ not in ("FakeTensor", "AsyncCollectiveTensor")


def check_class(tensor: torch.Tensor) -> None:
    """Check that a tensor holds its data itself.

    Raises:
        TypeError: It wraps others.
    """
    if is_wrapper(tensor):
        raise TypeError(
            f"A collective got a {type(tensor).__name__}, which wraps other tensors; pass the wrapped tensor, such as .to_local() of "
            "a DTensor."
        )


def check_writable(description: bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Check tensors that receive results.

    Raises:
        ValueError: Elements of one tensor share memory, as after ``expand``, so the result would be undefined.
    """
    for tensor in tensors:
        if not tensor.is_contiguous() and 0 in tensor.stride() and torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"{description_text(description)} would write to a tensor whose elements share memory (strides "
                f"{tensor.stride()}); pass a tensor with separate memory for each element, such as .contiguous()."
            )


def check_disjoint(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check tensors that are reduced one after the other.

    Raises:
        ValueError: Two contiguous tensors share memory, which would be reduced twice.
    """
    plain = [
        t for t in tensors if type(t) in PLAIN and t.layout is torch.strided and t.is_contiguous() and not t.is_meta
    ]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, id(t)) for t in plain)
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end and first != second:
            raise ValueError(
                f"{operation} got two tensors that share memory, which would be reduced twice; pass tensors that do not overlap."
            )


def check_pairs(operation: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Check the lists of a coalesced call.

    Raises:
        ValueError: They differ in length.
    """
    if len(outputs) != len(inputs):
        raise ValueError(f"{operation} got {len(outputs)} outputs for {len(inputs)} inputs; pass one for each.")


def equal_parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split a 1-D tensor, whose size `check_same` has checked, into `count` equal parts."""
    numel = tensor.numel() // count
    return [tensor[r * numel : (r + 1) * numel] for r in range(count)]


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


def on_host(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Replace the device tensors in `value` by copies on the host; block until the copies are complete.

    Args:
        value: A tensor, a nested list of tensors, or any other argument.
        copies: Receives each copy by the id of its tensor; a tensor that is listed twice is copied once.
    """
    if isinstance(value, (list, tuple)):
        return [on_host(item, copies) for item in value]
    if not isinstance(value, torch.Tensor) or value.is_cpu:
        return value
    if id(value) not in copies:
        copies[id(value)] = value.detach().cpu()
    return copies[id(value)]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` in row-major order, 1-D: a view if its memory has this layout, else a copy."""
    view = flat_view(tensor)
    return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1) if view is None else view


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return `tensor` as a 1-D view in row-major order, or None if its memory has another layout."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Not detach(): a write to its result raises the version counter of the caller's tensor, which Gloo and NCCL do not.
    return tensor.data if tensor.dim() == 1 else tensor.data.view(-1)
