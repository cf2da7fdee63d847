"""Settings of a start and their validation. Standard library only: the command line imports it without Ray."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ray_fracbackend.decide.backends import Backends, parse_backend

_Self = TypeVar("_Self", bound="Settings")


def _setting(default: Any, help_text: str, choices: tuple[str, ...] = ()) -> Any:
    """Declare a setting of our own: keyword-only, with its command line help; settings without help have no flag."""
    return field(default=default, kw_only=True, metadata={"help": help_text, "choices": choices})


def _stock(default: Any, help_text: str = "", choices: tuple[str, ...] = ()) -> Any:
    """Declare a setting that TorchConfig has too; it stays positional."""
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass
class Settings:
    """Settings of :class:`ray_fracbackend.FracTorchConfig`, which documents them.

    Raises:
        ValueError: A setting breaks its rule. The message has the value, the rule and the fix.
    """

    backend: str | None = _stock("auto", "auto, nccl, gloo, ipc, or a pair such as cpu:gloo,cuda:nccl")
    init_method: str = _stock("env", choices=("env", "tcp"))
    timeout_s: float = _stock(1800)
    on_shared_device: str = _setting(
        "auto", "what to do where ranks share a device", ("auto", "ipc", "gloo", "nccl", "error")
    )
    on_missing_cuda: str = _setting("error", "what to do where Ray gave GPUs that torch cannot use", ("error", "cpu"))
    verify: bool = _setting(True, "do not check the group before training")
    start_timeout_s: float = _setting(300.0, "bound on the start")
    master_addr: str | None = _setting(None, "address of rank 0's node that all others reach")
    master_port: int | tuple[int, int] | None = _setting(None, "port on rank 0's node, or a range LOW-HIGH of ports")
    limit_gpu_memory: bool = _setting(False, "cap each worker's CUDA memory at its GPU fraction")

    def __post_init__(self) -> None:
        try:
            # TorchTrainer replaces a falsy backend by "nccl" or "gloo" before the start can look at the workers.
            self.backend = parse_backend(self.backend).name
        except ValueError as error:
            raise ValueError(_text("backend", self.backend, str(error))) from None
        if isinstance(self.master_port, list):
            self.master_port = tuple(self.master_port)
        for name in ("init_method", "on_shared_device", "on_missing_cuda"):
            _check_choice(name, getattr(self, name), self.__dataclass_fields__[name].metadata["choices"])
        for name in ("timeout_s", "start_timeout_s"):
            _check_seconds(name, getattr(self, name))
        for name in ("verify", "limit_gpu_memory"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "must be True or False")
        _check_master_addr(self.master_addr)
        _check_master_port(self.master_port)

    @property
    def backends(self) -> Backends:
        """Requested backend by device type."""
        return parse_backend(self.backend)

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
    return tuple(Settings.__dataclass_fields__)


def _text(name: str, value: object, rule: str) -> str:
    return f"FracTorchConfig({name}={value!r}): {name} {rule}."


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ValueError(_text(name, value, rule))


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    listed = ", ".join(repr(choice) for choice in choices)
    _require(isinstance(value, str) and value in choices, name, value, f"must be one of {listed}")


def _check_seconds(name: str, value: object) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    _require(ok, name, value, "must be a finite number of seconds above 0, such as 300")


def _check_master_addr(value: object) -> None:
    rule = (
        "must be an IP address or a host name of rank 0's node without scheme, port, brackets or spaces, such as "
        "'10.0.0.3' or 'fd00::3'; leave it out to use the address that Ray knows for that node"
    )
    ok = value is None or (isinstance(value, str) and value != "" and not set(value) & set(" \t\n[]/,@"))
    if ok and isinstance(value, str):
        ok = value.count(":") != 1
    _require(ok, "master_addr", value, rule)


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535


def _check_master_port(value: object) -> None:
    rule = (
        "must be a port from 1 to 65535 or an inclusive range (low, high) of such ports, such as 29500 or "
        "(29500, 29600); leave it out to use any free port"
    )
    ok = value is None or _is_port(value)
    if isinstance(value, tuple):
        ok = len(value) == 2 and all(map(_is_port, value)) and value[0] <= value[1]
    _require(ok, "master_port", value, rule)
