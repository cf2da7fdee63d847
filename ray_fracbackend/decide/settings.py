"""Settings of a start and their validation. Standard library only: the command line imports it without Ray."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ray_fracbackend.decide.backends import Backends, parse_backend

# Over thirty years. torch takes some greater ones for no time at all.
MAX_S = 1e9
_Self = TypeVar("_Self", bound="Settings")


def _choice_rule(*choices: str) -> dict[str, Any]:
    rule = f"must be one of {', '.join(repr(choice) for choice in choices)}"
    return {"ok": lambda value: isinstance(value, str) and value in choices, "rule": rule, "choices": choices}


def is_seconds(value: object) -> bool:
    """Return whether a value is a number of seconds that torch's timeouts and Python's waits take."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_S


_SECONDS = {"ok": is_seconds, "rule": "must be a finite number of seconds above 0, up to 1e9, such as 300"}
_SWITCH = {"ok": lambda value: isinstance(value, bool), "rule": "must be True or False"}


def _is_address(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, str) or value in ("", "0.0.0.0", "::"):  # the last two are where to listen, not to connect
        return False
    return not set(value) & set(" \t\n[]/,@") and value.count(":") != 1 and not _is_number(value)


def _is_number(text: str) -> bool:
    """Return True for what is no dotted quad and is resolved to an address all the same: 6841231 is 0.104.99.143, and 10.1 10.0.0.1."""
    parts = text.rstrip(".").split(".")
    quad = len(parts) == 4 and all(part.isdecimal() and str(int(part)) == part and int(part) < 256 for part in parts)
    return not quad and all(re.fullmatch(r"\d+|0[xX][\da-fA-F]*", part) for part in parts)


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535


def _is_ports(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(map(_is_port, value)) and value[0] <= value[1]
    return value is None or _is_port(value)


def _setting(default: Any, rule: dict[str, Any], *, kw_only: bool = True) -> Any:
    """Declare a setting with its rule; its help on the command line is in cli/options.py."""
    return field(default=default, kw_only=kw_only, metadata={"choices": (), **rule})


@dataclass
class Settings:
    """Settings of :class:`ray_fracbackend.FracTorchConfig`, which documents them.

    The first three are TorchConfig's and stay positional.

    Raises:
        ValueError: A setting breaks its rule. The message has the value, the rule and the fix.
    """

    backend: str | None = _setting("auto", {}, kw_only=False)
    init_method: str = _setting("env", _choice_rule("env", "tcp"), kw_only=False)
    timeout_s: float = _setting(1800, _SECONDS, kw_only=False)
    on_shared_device: str = _setting("auto", _choice_rule("auto", "ipc", "staged", "gloo", "nccl", "error"))
    on_missing_cuda: str = _setting("error", _choice_rule("error", "cpu"))
    verify: bool = _setting(True, _SWITCH)
    start_timeout_s: float = _setting(300.0, _SECONDS)
    master_addr: str | None = _setting(
        None,
        {
            "ok": _is_address,
            "rule": "must be an IP address or a host name of rank 0's node, such as '10.0.0.3' or 'fd00::3', without scheme, port, "
            "brackets or spaces, and no number such as 10.1 or 6841231; leave it out to use the address that Ray knows for that node",
        },
    )
    master_port: int | tuple[int, int] | None = _setting(
        None,
        {
            "ok": _is_ports,
            "rule": "must be a port from 1 to 65535 or an inclusive range (low, high) of such ports, such as 29500 or "
            "(29500, 29600); leave it out to use any free port",
        },
    )
    limit_gpu_memory: bool = _setting(False, _SWITCH)

    def __post_init__(self) -> None:
        try:
            # TorchTrainer replaces a falsy backend by "nccl" or "gloo" before the start can look at the workers.
            self.backend = parse_backend(self.backend).name
        except ValueError as error:
            raise ValueError(f"FracTorchConfig(backend={self.backend!r}): backend {error}.") from None
        if isinstance(self.master_port, list):
            self.master_port = tuple(self.master_port)
        for setting in fields(Settings):
            ok: Callable[[object], bool] | None = setting.metadata.get("ok")
            value = getattr(self, setting.name)
            if ok is not None and not ok(value):
                raise ValueError(
                    f"FracTorchConfig({setting.name}={value!r}): {setting.name} {setting.metadata['rule']}."
                )

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
        """Return all settings as plain values that ``json.dumps`` takes."""
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


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of the fields."""
    return tuple(setting.name for setting in fields(Settings))
