"""Rebuild `WorkerInfo` from the plain values that another process sent, which may have another version of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ray_fracbackend import __version__
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text
from ray_fracbackend.errors import IncompatibleWorkersError

_hints = cache(get_type_hints)


def workers_of(answers: Sequence[tuple[str, Any]]) -> tuple[WorkerInfo, ...]:
    """Rebuild the workers from the answers of the probe.

    Args:
        answers: Of each rank, its version of this package, and its `WorkerInfo` as plain values.

    Raises:
        IncompatibleWorkersError: Ranks have another version than this process.
    """
    others = {rank: version for rank, (version, _) in enumerate(answers) if version != __version__}
    if others:
        found = f"{ranks_text(list(others))}: version {', '.join(sorted(set(others.values())))}"
        raise _other_version(found, others)
    try:
        return tuple(from_plain(WorkerInfo, plain) for _, plain in answers)
    except ValueError as error:
        raise _other_version(f"a worker: another build of version {__version__} ({error})") from None


def _other_version(found: str, ranks: Iterable[int] = ()) -> IncompatibleWorkersError:
    return IncompatibleWorkersError(
        f"{found} of ray_fracbackend, and the controller has {__version__}. Install one version on every node and in the "
        "environment of the driver, or ship it to all with py_modules in ray.init(runtime_env=...).",
        ranks=ranks,
    )


def from_plain(kind: Any, value: Any, name: str = "report") -> Any:
    """Rebuild a `WorkerInfo`, or a value of one of its types, from ``dataclasses.asdict``, also after JSON.

    Args:
        kind: The class or type.
        value: Untrusted plain value.
        name: Name of the value, for the message.

    Raises:
        ValueError: The value has another type, or a field is missing or unknown; the message names it.
    """
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        if isinstance(value, dict) and value.keys() == hints.keys():
            return kind(**{key: from_plain(hints[key], each, key) for key, each in value.items()})
    elif origin is UnionType:  # with None
        return None if value is None else from_plain(args[0], value, name)
    elif origin is tuple:
        kinds = args[:1] * len(value) if isinstance(value, (list, tuple)) and args[-1] is ... else args
        if isinstance(value, (list, tuple)) and len(value) == len(kinds):
            return tuple(from_plain(each, item, name) for each, item in zip(kinds, value, strict=True))
    elif origin is Mapping:
        if isinstance(value, dict):
            return {from_plain(args[0], key, name): from_plain(args[1], each, name) for key, each in value.items()}
    elif isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool):
        return value
    raise ValueError(f"{name} is {value!r:.80}")
