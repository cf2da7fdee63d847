"""Settings of a start and their validation. Standard library only: the command line imports it without Ray."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ray_fracbackend.decide.backends import Backends, parse_backend
from ray_fracbackend.decide.suggestions import nearest

# Over thirty years. torch treats some greater values as zero.
MAX_S = 1e9
_Self = TypeVar("_Self", bound="Settings")
_Class = TypeVar("_Class")


def is_seconds(value: object) -> bool:
    """Return whether a value is a number of seconds that torch's timeouts and Python's waits accept."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_S


def _is_address(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, str) or value in ("", "0.0.0.0", "::"):  # the last two are where to listen, not to connect
        return False
    return not set(value) & set(" \t\n[]/,@") and value.count(":") != 1 and not _is_number(value)


def _is_number(text: str) -> bool:
    """Return True for text that is not a dotted quad but resolves to an address: 6841231 is 0.104.99.143, and 10.1 is 10.0.0.1."""
    parts = text.rstrip(".").split(".")
    quad = len(parts) == 4 and all(part.isdecimal() and str(int(part)) == part and int(part) < 256 for part in parts)
    return not quad and all(re.fullmatch(r"\d+|0[xX][\da-fA-F]*", part) for part in parts)


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535


def _is_ports(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(map(_is_port, value)) and value[0] <= value[1]
    return value is None or _is_port(value)


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


_SECONDS = (is_seconds, "must be a finite number of seconds above 0, up to 1e9, such as 300")
_SWITCH = (_is_switch, "must be True or False")
# Check and rule by the name of the setting. The rule of backend is in backends.py, that of a choice in its type.
_RULES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "timeout_s": _SECONDS,
    "verify": _SWITCH,
    "start_timeout_s": _SECONDS,
    "master_addr": (
        _is_address,
        "must be an IP address or a host name of rank 0's node, such as '10.0.0.3' or 'fd00::3', without scheme, port, "
        "brackets or spaces, and no number such as 10.1 or 6841231; leave it out to use the address that Ray knows for that node",
    ),
    "master_port": (
        _is_ports,
        "must be a port from 1 to 65535 or an inclusive range (low, high) of such ports, such as 29500 or "
        "(29500, 29600); leave it out to use any free port",
    ),
    "limit_gpu_memory": _SWITCH,
}


def names_checked(cls: type[_Class]) -> type[_Class]:
    """Decorate a dataclass of settings: a wrong name in its constructor is a TypeError that suggests the right one."""
    dataclass_init: Any = cls.__init__

    @functools.wraps(dataclass_init)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        _check_names(cls, args, settings)
        dataclass_init(self, *args, **settings)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def _check_names(cls: Any, args: tuple[object, ...], settings: Mapping[str, object]) -> None:
    names = [each.name for each in fields(cls) if each.init]
    positional = [each.name for each in fields(cls) if each.init and not each.kw_only]
    if len(args) > len(positional):
        raise TypeError(
            f"FracTorchConfig({', '.join(map(repr, args))}): only {', '.join(positional)} can be given by position. Name the "
            f"others, such as on_shared_device={args[len(positional)]!r}."
        )
    for name, value in settings.items():
        if name not in names:
            meant = nearest(name, names)
            hint = f"did you mean {meant}?" if meant else f"the settings are {', '.join(names)}."
            raise TypeError(f"FracTorchConfig({name}={value!r}): there is no setting {name}; {hint}")


@names_checked
@dataclass(repr=False)
class Settings:
    """Settings of :class:`ray_fracbackend.FracTorchConfig`, which documents them.

    The first three are TorchConfig's and stay positional.

    Raises:
        TypeError: There is no setting of this name. The message has the value and the most similar setting.
        ValueError: A setting breaks its rule. The message has the value, the rule and the fix.
    """

    backend: str | None = "auto"
    init_method: Literal["env", "tcp"] = "env"
    timeout_s: float = 1800
    _: KW_ONLY
    on_shared_device: Literal["auto", "ipc", "staged", "gloo", "nccl", "error"] = "auto"
    on_missing_cuda: Literal["error", "cpu"] = "error"
    verify: bool = True
    start_timeout_s: float = 300.0
    master_addr: str | None = None
    master_port: int | tuple[int, int] | None = None
    limit_gpu_memory: bool = False

    def __post_init__(self) -> None:
        try:
            # TorchTrainer replaces a falsy backend by "nccl" or "gloo" before the start can look at the workers.
            self.backend = parse_backend(self.backend).name
        except ValueError as error:
            raise ValueError(f"FracTorchConfig(backend={self.backend!r}): backend {error}.") from None
        if isinstance(self.master_port, list):
            self.master_port = tuple(self.master_port)
        for name in setting_names():
            value = getattr(self, name)
            if broken := _broken_rule(name, value):
                raise ValueError(f"FracTorchConfig({name}={value!r}): {name} {broken}.")

    def __repr__(self) -> str:
        """Return the call that makes these settings: those that are not the defaults."""
        given = [each for each in fields(self) if each.repr and getattr(self, each.name) != each.default]
        return f"{type(self).__name__}({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in given)})"

    @property
    def backends(self) -> Backends:
        """Requested backend by device type."""
        return parse_backend(self.backend)

    @property
    def may_use_shared_memory(self) -> bool:
        """Whether a start may choose the backends ipc or staged, so that their probe is worth its cost."""
        by_name = self.backends.has_ipc or self.backends.has_staged
        return by_name or self.on_shared_device in ("ipc", "staged")

    def to_plain(self) -> dict[str, Any]:
        """Return all settings as plain values that ``json.dumps`` accepts."""
        values = {name: getattr(self, name) for name in setting_names()}
        if isinstance(self.master_port, tuple):
            values["master_port"] = list(self.master_port)
        return values

    def checked_copy(self: _Self) -> _Self:
        """Copy the settings, so that a later change of the original cannot reach a running start.

        Raises:
            ValueError: A setting was changed since, to a value that breaks its rule.
        """
        settings = copy.copy(self)
        Settings.__post_init__(settings)
        return settings


# Values of each setting that is a choice, from its type.
CHOICES: Mapping[str, tuple[str, ...]] = {
    name: get_args(kind) for name, kind in get_type_hints(Settings).items() if get_origin(kind) is Literal
}


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of the fields."""
    return tuple(setting.name for setting in fields(Settings))


def unknown_fields_warning(config: Settings, stock: Any) -> str | None:
    """Return a warning about fields that a newer Ray has added to TorchConfig, because a start does not use them.

    Args:
        config: The user's.
        stock: A TorchConfig with the defaults.

    Returns:
        The warning, None if these fields have their defaults.
    """
    added = [each.name for each in fields(stock) if each.name not in setting_names()]
    given = [f"{name}={getattr(config, name)!r}" for name in added if getattr(config, name) != getattr(stock, name)]
    ignored = "of this Ray's TorchConfig has no effect with FracTorchConfig; omit it, or use TorchConfig"
    return f"{', '.join(given)} {ignored}" if given else None


def _broken_rule(name: str, value: object) -> str | None:
    """Return the rule that a value of a setting breaks, None if it breaks none."""
    choices = CHOICES.get(name)
    if choices is not None:
        if isinstance(value, str) and value in choices:
            return None
        meant = nearest(value, choices)
        hint = f" (did you mean {meant!r}?)" if meant else ""
        return f"must be one of {', '.join(map(repr, choices))}{hint}"
    if name not in _RULES:  # backend, which is already checked
        return None
    is_ok, rule = _RULES[name]
    return None if is_ok(value) else rule
