"""Settings of a start and their validation. Standard library only: the command line imports it without Ray."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from ray_fracbackend.decide.backends import Backends, parse_backend
from ray_fracbackend.decide.suggestions import did_you_mean

# Over thirty years. torch treats some greater values as zero.
MAX_S = 1e9
_Self = TypeVar("_Self", bound="Settings")


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


def is_seconds(value: object) -> bool:
    """Return whether a value is a number of seconds that torch's timeouts and Python's waits accept."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_S


def switch(name: str, value: str) -> bool:
    """Return whether an environment variable is 1 and not 0; raise a ValueError for another value."""
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r}: must be 0 or 1; leave it out for 1.")
    return value == "1"


def _is_address(value: object) -> bool:
    if not isinstance(value, str) or value in ("", "0.0.0.0", "::"):  # the last two are where to listen, not to connect
        return False
    return not set(value) & set(" \t\n[]/,@") and value.count(":") != 1


def _is_ports(value: object) -> bool:
    ports = value if isinstance(value, tuple) else (value, value)
    are_ports = all(isinstance(port, int) and not isinstance(port, bool) and 1 <= port <= 65535 for port in ports)
    return are_ports and len(ports) == 2 and ports[0] <= ports[1]


@dataclass(repr=False)
class Settings:
    """Settings of :class:`ray_fracbackend.FracTorchConfig`, which documents them.

    The first three are TorchConfig's and stay positional. The help text of a switch that is on is that of ``--no-NAME``.

    Raises:
        ValueError: A setting breaks its rule. The message has the value, the rule and the fix.
    """

    backend: str | None = _option("auto", "auto, nccl, gloo, ipc, staged, or a pair such as cpu:gloo,cuda:nccl")
    init_method: Literal["env", "tcp"] = _option("env", "env or tcp, as for TorchConfig")
    timeout_s: float = _option(1800, "timeout of collectives once training runs")
    _: KW_ONLY
    on_shared_device: Literal["auto", "ipc", "staged", "gloo", "nccl", "error"] = _option(
        "auto", "what to do when ranks share a device"
    )
    on_missing_cuda: Literal["error", "cpu"] = _option("error", "what to do if Ray assigned GPUs that torch cannot use")
    verify: bool = _option(True, "do not check the group before training")
    start_timeout_s: float = _option(300.0, "time limit for connecting and checking, and for the probe before them")
    master_addr: str | None = _option(None, "address of rank 0's node that all other nodes reach")
    master_port: int | tuple[int, int] | None = _option(None, "port on rank 0's node, or a range LOW-HIGH of ports")
    limit_gpu_memory: bool = _option(False, "cap each worker's CUDA memory at its GPU fraction")

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every setting; also write backend and master_port in their normal form.

        Raises:
            ValueError: A setting breaks its rule.
        """
        try:
            # TorchTrainer replaces a falsy backend by "nccl" or "gloo" before the start can look at the workers.
            self.backend = parse_backend(self.backend).name
        except ValueError as error:
            self._refuse("backend", str(error))
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                hint = did_you_mean(value, choices)
                self._refuse(name, f"must be one of {', '.join(map(repr, choices))}{hint}")
        for name in ("timeout_s", "start_timeout_s"):
            if not is_seconds(getattr(self, name)):
                self._refuse(name, "must be a finite number of seconds above 0, up to 1e9, such as 300")
        for name in ("verify", "limit_gpu_memory"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "must be True or False")
        if self.master_addr is not None and not _is_address(self.master_addr):
            self._refuse(
                "master_addr",
                "must be an IP address or a host name of rank 0's node, such as '10.0.0.3' or 'fd00::3', without scheme, port, "
                "brackets or spaces; leave it out to use the address that Ray knows for that node",
            )
        if isinstance(self.master_port, list):
            self.master_port = tuple(self.master_port)
        if self.master_port is not None and not _is_ports(self.master_port):
            self._refuse(
                "master_port",
                "must be a port from 1 to 65535 or an inclusive range (low, high) of such ports, such as 29500 or "
                "(29500, 29600); leave it out to use any free port",
            )

    def _refuse(self, name: str, rule: str) -> NoReturn:
        raise ValueError(f"FracTorchConfig({name}={getattr(self, name)!r}): {name} {rule}.") from None

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
        return {name: getattr(self, name) for name in setting_names()}

    def checked_copy(self: _Self) -> _Self:
        """Copy the settings, so that a later change of the original cannot reach a running start.

        Raises:
            ValueError: A setting was changed since, to a value that breaks its rule.
        """
        settings = copy.copy(self)
        settings.validate()
        return settings


# Values of each setting that is a choice, from its type.
CHOICES: Mapping[str, tuple[str, ...]] = {
    name: get_args(kind) for name, kind in get_type_hints(Settings).items() if get_origin(kind) is Literal
}


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of the fields."""
    return tuple(setting.name for setting in fields(Settings))


def unknown_fields_warning(config: Settings, stock: Any) -> str | None:
    """Return a warning about fields of a newer Ray's TorchConfig that differ from a stock one's, as a start does not use them."""
    added = [each.name for each in fields(stock) if each.name not in setting_names()]
    given = [f"{name}={getattr(config, name)!r}" for name in added if getattr(config, name) != getattr(stock, name)]
    ignored = "of this Ray's TorchConfig has no effect with FracTorchConfig; omit it, or use TorchConfig"
    return f"{', '.join(given)} {ignored}" if given else None
