"""What the user asked for, as one frozen value, and the rules that each setting must keep. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

ON_SHARED_DEVICE = ("auto", "ipc", "gloo", "nccl", "error")
ON_MISSING_CUDA = ("error", "cpu")
INIT_METHODS = ("env", "tcp")


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Validated settings of one start; see :class:`ray_fracbackend.FracTorchConfig` for what each one means.

    Raises:
        ValueError: A setting breaks its rule. The message has the value, the rule and the fix.
    """

    backend: str = "auto"
    init_method: str = "env"
    timeout_s: float = 1800
    on_shared_device: str = "auto"
    on_missing_cuda: str = "error"
    verify: bool = True
    start_timeout_s: float = 300.0
    master_addr: str | None = None
    master_port: int | tuple[int, int] | None = None
    limit_gpu_memory: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", _normal_backend(self.backend))
        _check_backend(self.backend)
        _check_choice("init_method", self.init_method, INIT_METHODS)
        _check_choice("on_shared_device", self.on_shared_device, ON_SHARED_DEVICE)
        _check_choice("on_missing_cuda", self.on_missing_cuda, ON_MISSING_CUDA)
        for name in ("timeout_s", "start_timeout_s"):
            _check_seconds(name, getattr(self, name))
        for name in ("verify", "limit_gpu_memory"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "must be True or False")
        _check_master_addr(self.master_addr)
        _check_master_port(self.master_port)

    @classmethod
    def from_config(cls, config: Any) -> StartOptions:
        """Copies the settings off a config object at once, so that a later change of it cannot reach a running start."""
        values = {field.name: getattr(config, field.name) for field in fields(cls)}
        if isinstance(values["master_port"], list):
            values["master_port"] = tuple(values["master_port"])
        return cls(**values)


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"FracTorchConfig({name}={value!r}): {name} {rule}.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    listed = ", ".join(repr(choice) for choice in choices)
    _require(isinstance(value, str) and value in choices, name, value, f"must be one of {listed}")


def _normal_backend(value: Any) -> Any:
    """A backend's name as torch itself reads it, in lower case; ``auto`` where none is given."""
    if value is None or value == "":
        return "auto"
    return value.lower() if isinstance(value, str) else value


def _check_backend(value: object) -> None:
    rule = (
        "must be 'auto', 'nccl', 'gloo', 'ipc', a pair such as 'cpu:gloo,cuda:nccl', or the name of a backend that is "
        "registered with torch.distributed, without spaces; leave it out to let the start decide"
    )
    ok = isinstance(value, str) and not any(character.isspace() for character in value)
    if ok and isinstance(value, str) and (":" in value or "," in value):
        parts = [part.split(":") for part in value.split(",")]
        ok = all(len(part) == 2 and all(part) for part in parts)
        # torch puts a group with ipc in the place of the whole pair, without a word.
        alone = "must be 'ipc' where it has ipc, which is for tensors of all devices and cannot be one of a pair"
        _require(not any(part[-1] == "ipc" for part in parts), "backend", value, alone)
    _require(ok, "backend", value, rule)


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


def setting_names() -> tuple[str, ...]:
    """Names of all settings, in the order of FracTorchConfig's fields."""
    return tuple(field.name for field in fields(StartOptions))
