"""Parse and check the arguments of a process group's methods, in every form that torch accepts. Imports torch.

torch's C++ and `torch.distributed` pass tensors and an options object. A caller can also pass root, reduce operation
and timeout one by one, by position or by name (the overloads of ``ProcessGroup`` in torch's _distributed_c10d.pyi).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch

from .._torch import RedOpType, ReduceOp, c10d, no_torch_dispatch
from ..protocol.description import description_text
from .observers import PLAIN

_Method = TypeVar("_Method", bound=Callable[..., Any])
_NO_TIME = timedelta(0)
# Fields of the options object for the arguments that can be passed one by one.
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def takes(options: str, *tensors: str, also: Sequence[str] = ()) -> Callable[[_Method], _Method]:
    """Decorate a method of ``(self, *tensors, opts)`` to accept torch's other forms of a call too.

    Args:
        options: Class of the options, such as ``AllreduceOptions``.
        tensors: Names of the arguments before the options; ``/`` separates alternative names.
        also: Arguments accepted in place of the options, in torch's order: some of ``root``, ``op`` and ``timeout``.
            ``root`` has no default.

    Returns:
        A decorator. The undecorated method checks a call and returns a function that starts it; the decorated
        method also starts it. It raises TypeError for a call in none of these forms.
    """
    classes = (getattr(c10d, options),)
    names = [name.split("/") for name in tensors]

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs and len(args) == len(names) + 1 and isinstance(args[-1], classes):
                return method(self, *args)()
            return method(self, *_read(method.__name__, classes, names, also, args, kwargs))()

        return call  # type: ignore[return-value]

    return decorate


def _read(
    method: str,
    classes: tuple[type[Any], ...],
    names: list[list[str]],
    also: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """Return the tensors and options of a call."""
    given, found = dict(kwargs), list(args[: len(names)])
    for alternatives in names[len(found) :]:
        name = next((name for name in alternatives if name in given), None)
        if name is None:
            raise TypeError(f"{method}() needs {' or '.join(alternatives)}.")
        found.append(given.pop(name))
    rest = args[len(names) :]
    if rest and (rest[0] is None or isinstance(rest[0], classes)):
        given, rest = {"opts": rest[0], **given}, rest[1:]
    if "opts" in given:
        opts = given.pop("opts")
        if rest or given or not isinstance(opts, (*classes, type(None))):
            raise TypeError(f"{method}() accepts opts of class {classes[0].__name__}, with no other arguments.")
        return [*found, opts if opts is not None else classes[0]()]
    if len(rest) > len(also) or any(name in given for name in also[: len(rest)]):
        raise TypeError(f"{method}() got {len(rest)} arguments after the tensors; it accepts {_form(also)}.")
    given = dict(zip(also, rest, strict=False)) | given
    if unknown := sorted(set(given) - set(also)):
        raise TypeError(f"{method}() got {', '.join(unknown)}; after the tensors it accepts {_form(also)}.")
    if "root" in also and "root" not in given and given:
        raise TypeError(f"{method}() needs root if it is called without options.")
    opts = classes[0]()
    for name, value in given.items():
        if (value := _value_of(method, name, value)) is not None:
            setattr(opts, _FIELDS[name], value)
    return [*found, opts]


def _form(also: Sequence[str]) -> str:
    return " or ".join(["opts", *([", ".join(also)] if also else [])])


def _value_of(method: str, name: str, value: Any) -> Any:
    """Convert a value to the type of its options field; None for a timeout that was not passed."""
    if name == "root":
        return operator.index(value)
    if name == "op":
        if not isinstance(value, (ReduceOp, RedOpType)):
            raise TypeError(f"{method}(op={value!r}): op must be a torch.distributed.ReduceOp.")
        return value
    if isinstance(value, (int, float)):
        return timedelta(seconds=value)
    if value is not None and not isinstance(value, timedelta):
        raise TypeError(f"{method}(timeout={value!r}): timeout must be a datetime.timedelta.")
    return value


def wants_async(opts: Any) -> bool:
    """Return whether the call is asynchronous; always True before torch 2.8, which has no ``asyncOp``."""
    return bool(getattr(opts, "asyncOp", True))


def timeout_of(opts: Any, default_s: float) -> float:
    """Return the timeout of an options object in seconds; torch uses -1 ms or 0 for "the group's default"."""
    timeout = getattr(opts, "timeout", None)
    if isinstance(timeout, timedelta) and timeout > _NO_TIME:
        return timeout.total_seconds()
    return default_s


def root_of(operation: str, opts: Any, count: int) -> int:
    """Return the root of a call.

    Raises:
        ValueError: It is not a rank of the group, or the root tensor is not tensor 0.
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
        ValueError: The list does not have exactly one tensor.
    """
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{operation} got {len(tensors)} tensors; this backend accepts one tensor per call.")
    return tensors[0]


def lists(tensors: Any) -> list[torch.Tensor]:
    """Return the inner list if `tensors` is a list of one list, else `tensors` as a list."""
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list(tensors[0])
    return list(tensors)


def check_same(operation: str, tensors: Sequence[torch.Tensor], count: int, dtype: torch.dtype, numel: int) -> None:
    """Check a list of tensors that must have one element type and size.

    Raises:
        ValueError: The number of tensors, an element type or a size is wrong.
    """
    if len(tensors) != count:
        raise ValueError(f"{operation} got {len(tensors)} tensors for {count} ranks; pass one for each rank.")
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.numel() != numel:
            raise ValueError(
                f"{operation} got a tensor of {tensor.dtype}[{tensor.numel()}], but expects {dtype}[{numel}]; all "
                f"parts must have one element type and size."
            )


def check_one_type(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check that tensors, which may differ in size, have one element type.

    Raises:
        ValueError: Their element types differ.
    """
    types = dict.fromkeys(tensor.dtype for tensor in tensors)
    if len(types) > 1:
        raise ValueError(f"{operation} got tensors of {' and '.join(map(str, types))}; all must have one element type.")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor wraps others, such as a DTensor: it would intercept each copy of a collective."""
    kind = type(tensor)
    dispatch = getattr(kind, "__torch_dispatch__", no_torch_dispatch)
    # AsyncCollectiveTensor, from functional collectives, waits and unwraps itself on any use.
    return dispatch is not no_torch_dispatch and kind.__name__ not in ("FakeTensor", "AsyncCollectiveTensor")


def check_class(tensor: torch.Tensor) -> None:
    """Check that a tensor holds its own data.

    Raises:
        TypeError: It wraps others.
    """
    if is_wrapper(tensor):
        raise TypeError(
            f"A collective got a {type(tensor).__name__}, which wraps other tensors; "
            "pass the wrapped tensor, such as .to_local() of a DTensor."
        )


def check_writable(description: bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Check that tensors can receive results.

    Raises:
        ValueError: Elements of a tensor share memory, as after ``expand``: the result of writing to them is undefined.
    """
    for tensor in tensors:
        if not tensor.is_contiguous() and 0 in tensor.stride() and torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"{description_text(description)} would write to a tensor whose elements share memory (strides "
                f"{tensor.stride()}); pass a tensor without shared elements, such as a copy from .contiguous()."
            )


def check_disjoint(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check that tensors, which are reduced one after the other, share no memory.

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
                f"{operation} got two tensors that share memory, which would be reduced twice; pass distinct memory."
            )


def check_pairs(operation: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Check that the lists of a coalesced call have one length.

    Raises:
        ValueError: They differ in length.
    """
    if len(outputs) != len(inputs):
        raise ValueError(f"{operation} got {len(outputs)} outputs for {len(inputs)} inputs; pass one per input.")


def equal_parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split a 1-D tensor, whose size `check_same` has checked, into `count` equal parts."""
    numel = tensor.numel() // count
    return [tensor[r * numel : (r + 1) * numel] for r in range(count)]


def split_parts(operation: str, tensor: torch.Tensor, splits: Sequence[int], count: int) -> list[torch.Tensor]:
    """Split a tensor's flat memory by rows, as in all_to_all_single; empty `splits` mean equal parts.

    Args:
        operation: Name of the collective, for error messages.
        tensor: Contiguous, any shape.
        splits: Rows of dimension 0 for each rank.
        count: Number of ranks.

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
    """Return tensors, or nested lists of them, with device tensors copied to the host; block until that is done.

    Args:
        value: A tensor, a list, or a value without tensors, which is returned unchanged.
        copies: Filled with each copy by the id of its tensor; a tensor that is listed twice has one copy.
    """
    if isinstance(value, (list, tuple)):
        return [on_host(item, copies) for item in value]
    if not isinstance(value, torch.Tensor) or value.is_cpu:
        return value
    if id(value) not in copies:
        copies[id(value)] = value.detach().cpu()
    return copies[id(value)]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` in row-major order, 1-D: a view if its memory has that order, else a copy."""
    view = flat_view(tensor)
    return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1) if view is None else view


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of `tensor` as a 1-D view, or None if its elements are not in row-major order there."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Not detach(): writes to its result increase the version of the caller's tensor, those of Gloo and NCCL do not.
    return tensor.data if tensor.dim() == 1 else tensor.data.view(-1)
