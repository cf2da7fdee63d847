"""Reads a call of a process group in every form that torch's own groups take. Imports torch.

torch's C++ and `torch.distributed` pass tensors and an options object. A caller may as well pass root, reduce operation
and time limit one by one, by position or by name (the overloads of ``ProcessGroup`` in torch's _distributed_c10d.pyi).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from .._torch import RedOpType, ReduceOp, c10d

_Method = TypeVar("_Method", bound=Callable[..., Any])
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
        A decorator. The method raises TypeError for a call that has none of the forms.
    """
    classes = (getattr(c10d, options),)
    names = [name.split("/") for name in tensors]

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs and len(args) == len(names) + 1 and isinstance(args[-1], classes):
                return method(self, *args)
            return method(self, *_read(method.__name__, classes, names, also, args, kwargs))

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
    """Tensors and options of a call."""
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
    """A value as the options take it; None for a time limit that was not given."""
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
