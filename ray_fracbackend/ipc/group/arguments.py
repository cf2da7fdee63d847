"""Read and check what a caller passes to a process group, in every form that torch's own groups take. Imports torch.

torch's C++ and `torch.distributed` pass tensors and an options object. A caller may as well pass root, reduce operation and
timeout one by one, by position or by name (the overloads of ``ProcessGroup`` in torch's _distributed_c10d.pyi).
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
# Fields of the options for what may be passed by itself.
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def takes(options: str, *tensors: str, also: Sequence[str] = ()) -> Callable[[_Method], _Method]:
    """Decorate a method of ``(self, *tensors, opts)`` so that it can be called in torch's other forms.

    Args:
        options: Class of the options, such as ``AllreduceOptions``.
        tensors: Names of the arguments before the options; alternatives with ``/`` between them.
        also: What may stand instead of the options, in torch's order: of ``root``, ``op`` and ``timeout``. A root has
            no default.

    Returns:
        A decorator. The method itself checks a call and returns what makes it; decorated it makes the call. It raises
        TypeError for a call that has none of the forms.
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
            raise TypeError(f"{method}() takes options of class {classes[0].__name__}, and nothing beside them.")
        return [*found, opts if opts is not None else classes[0]()]
    if len(rest) > len(also) or any(name in given for name in also[: len(rest)]):
        raise TypeError(f"{method}() got {len(rest)} arguments after the tensors; it takes {_form(also)}.")
    given = dict(zip(also, rest, strict=False)) | given
    if unknown := sorted(set(given) - set(also)):
        raise TypeError(f"{method}() got {', '.join(unknown)}; after the tensors it takes {_form(also)}.")
    if "root" in also and "root" not in given and given:
        raise TypeError(f"{method}() needs root where it gets no options.")
    opts = classes[0]()
    for name, value in given.items():
        if (value := _value_of(method, name, value)) is not None:
            setattr(opts, _FIELDS[name], value)
    return [*found, opts]


def _form(also: Sequence[str]) -> str:
    return " or ".join(["opts", *([", ".join(also)] if also else [])])


def _value_of(method: str, name: str, value: Any) -> Any:
    """Return a value as the options take it; None for a timeout that was not given."""
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
    """Return whether the caller goes on while the collective runs; True where torch does not say (before 2.8)."""
    return bool(getattr(opts, "asyncOp", True))


def timeout_of(opts: Any, default_s: float) -> float:
    """Return the timeout of an options object in seconds; torch writes -1 ms or 0 for "the group's own"."""
    timeout = getattr(opts, "timeout", None)
    if isinstance(timeout, timedelta) and timeout > _NO_TIME:
        return timeout.total_seconds()
    return default_s


def root_of(operation: str, opts: Any, count: int) -> int:
    """Return the root of a call.

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
    """Return the one tensor of a list of one.

    Raises:
        ValueError: There is not exactly one.
    """
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{operation} got {len(tensors)} tensors; this backend takes one per rank and call.")
    return tensors[0]


def lists(tensors: Any) -> list[torch.Tensor]:
    """Return the inner list of a list of one list, or a flat list itself."""
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
    """Return whether a tensor wraps others, and would see each copy of a collective: a DTensor, for one."""
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


def check_pairs(operation: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Check the lists of a coalesced call.

    Raises:
        ValueError: They differ in length.
    """
    if len(outputs) != len(inputs):
        raise ValueError(f"{operation} got {len(outputs)} outputs for {len(inputs)} inputs; pass one for each.")


def equal_parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split a 1-D tensor, whose size `check_same` has found right, into `count` equal parts."""
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
    """Return tensors, or lists of lists of them, with those of a device as copies on the host; blocks until they are there.

    Args:
        value: A tensor, a list, or what has none.
        copies: Receives each copy by the id of its tensor; a tensor that is listed twice has one copy.
    """
    if isinstance(value, (list, tuple)):
        return [on_host(item, copies) for item in value]
    if not isinstance(value, torch.Tensor) or value.is_cpu:
        return value
    if id(value) not in copies:
        copies[id(value)] = value.detach().cpu()
    return copies[id(value)]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` in row-major order, 1-D: a view where its memory is laid out so, else a copy."""
    view = flat_view(tensor)
    return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1) if view is None else view


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of `tensor` as a 1-D view, or None where that is not its elements in row-major order."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Not detach(): what is written to that raises the version of the caller's tensor, which Gloo and NCCL leave alone.
    return tensor.data if tensor.dim() == 1 else tensor.data.view(-1)
