"""Options that several commands have, and the types of their values. Standard library only."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from ray_fracbackend.cli.program import wrong_usage
from ray_fracbackend.decide.settings import CHOICES, MAX_S, Settings, setting_names

# Ray itself tests clusters with this number of actors; each probe worker is an actor.
MAX_WORKERS = 10_000
# More than any machine has.
MAX_DECLARED = 10_000
# Seconds.
_WAIT_S = 30.0


@dataclass(frozen=True)
class _Option:
    """Option of a setting of FracTorchConfig.

    Attributes:
        help: Text for ``--help``; for a switch that is on by default, the text for ``--no-NAME``.
        name: Name of the option if it differs from that of the setting.
    """

    help: str
    name: str = ""


# By the name of the setting.
_OPTIONS: Mapping[str, _Option] = {
    "backend": _Option("auto, nccl, gloo, ipc, staged, or a pair such as cpu:gloo,cuda:nccl"),
    "init_method": _Option("env or tcp, as for TorchConfig"),
    # --timeout-s limits how long plan and test wait for cluster and resources.
    "timeout_s": _Option("timeout of collectives once training runs", name="collective_timeout_s"),
    "on_shared_device": _Option("what to do when ranks share a device"),
    "on_missing_cuda": _Option("what to do when Ray assigned GPUs that torch cannot use"),
    "verify": _Option("do not check the group before training"),
    "start_timeout_s": _Option("time limit for connecting and checking, and for the probe before them"),
    "master_addr": _Option("address of rank 0's node that all other nodes reach"),
    "master_port": _Option("port on rank 0's node, or a range LOW-HIGH of ports"),
    "limit_gpu_memory": _Option("cap each worker's CUDA memory at its GPU fraction"),
}


def add_workers(command: argparse.ArgumentParser, num_workers: int | None) -> None:
    """Add the options that `plan` and `test` share: workers, cluster, settings."""
    default = f" (default {num_workers})" if num_workers else ""
    command.add_argument(
        "--num-workers",
        type=count(MAX_WORKERS),
        required=num_workers is None,
        default=num_workers,
        metavar="NUMBER",
        help=f"number of workers, as for ScalingConfig{default}",
    )
    command.add_argument(
        "--gpus-per-worker",
        type=_gpus,
        default=0,
        metavar="AMOUNT",
        help="GPUs of each worker, such as 0.5 (default 0)",
    )
    command.add_argument(
        "--cpus-per-worker", type=_amount, default=1, metavar="AMOUNT", help="CPUs of each worker (default 1)"
    )
    command.add_argument(
        "--placement-strategy",
        choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        default="PACK",
        help="as for ScalingConfig (default PACK)",
    )
    add_wait(command, _WAIT_S, "how long to wait for cluster and resources")
    add_cluster(
        command, "default: the running cluster that ray.init() finds, else a new local one, announced on stderr"
    )
    add_local_ray(command, "this command")
    add_settings(command)


def add_wait(command: argparse.ArgumentParser, default: float, what: str) -> None:
    """Add ``--timeout-s``."""
    command.add_argument(
        "--timeout-s",
        dest="wait_s",
        type=_seconds,
        default=default,
        metavar="SECONDS",
        help=f"{what} (default {default:g})",
    )


def add_cluster(command: argparse.ArgumentParser, default: str) -> None:
    """Add ``--address`` and ``--json``."""
    command.add_argument("--address", help=f"address of a Ray cluster, as for ray.init ({default})")
    command.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_local_ray(command: argparse.ArgumentParser, starter: str) -> None:
    """Add ``--num-gpus`` and ``--num-cpus``: resources that a Ray started here declares."""
    text = f"number of logical {{}}s to declare, if {starter} starts Ray; Ray does not check that they exist"
    for name in ("GPU", "CPU"):
        kind = count(MAX_DECLARED, least=0)
        command.add_argument(f"--num-{name.lower()}s", type=kind, metavar="NUMBER", help=text.format(name))


def local_ray(options: argparse.Namespace) -> dict[str, int]:
    """Return the arguments of ``ray.init`` on the command line: ``num_gpus`` and ``num_cpus``."""
    given = {name: getattr(options, name) for name in ("num_gpus", "num_cpus")}
    return {name: value for name, value in given.items() if value is not None}


def declared_text(declared: Mapping[str, int]) -> str:
    """Return the resources of a Ray that was started with these arguments of ``ray.init``, as a sentence."""
    parts = [
        f"{number} logical {name.removeprefix('num_')[:-1].upper()}{'' if number == 1 else 's'}"
        for name, number in declared.items()
    ]
    return f"this Ray has {' and '.join(parts)} ({options_text(declared)})"


def options_text(declared: Mapping[str, int]) -> str:
    """Return these arguments of ``ray.init`` as command-line options."""
    return ", ".join(f"--{name.replace('_', '-')} {number}" for name, number in declared.items())


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add the settings of FracTorchConfig, each absent unless set; ``--no-NAME`` for those that are on by default."""
    group = command.add_argument_group("settings of FracTorchConfig")
    for setting in fields(Settings):
        text, choices = _OPTIONS[setting.name].help, CHOICES.get(setting.name)
        kind: dict[str, Any] = {"choices": choices} if choices else {"metavar": setting.name.split("_")[-1].upper()}
        if isinstance(setting.default, bool):
            kind = {"action": "store_false" if setting.default else "store_true"}
        elif setting.name.endswith("_s"):
            kind = {"type": _seconds, "metavar": "SECONDS"}
        elif setting.name == "master_port":
            kind = {"type": _ports, "metavar": "PORT"}
        group.add_argument(_flag(setting), dest=setting.name, default=argparse.SUPPRESS, help=text, **kind)


def _flag(setting: Field[Any]) -> str:
    name = _OPTIONS[setting.name].name or setting.name
    return f"--{'no-' if setting.default is True else ''}{name.replace('_', '-')}"


def setting_options() -> dict[str, str]:
    """Return the option of each setting of FracTorchConfig."""
    return {setting.name: _flag(setting) for setting in fields(Settings)}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of FracTorchConfig on the command line."""
    return {name: getattr(options, name) for name in setting_names() if hasattr(options, name)}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check the settings of FracTorchConfig without torch and Ray.

    Raises:
        CommandError: A setting breaks its rule.
    """
    try:
        Settings(**settings)
    except ValueError as error:
        raise wrong_usage(error) from None


def count(most: int, least: int = 1) -> Callable[[str], int]:
    """Return the argument type of a whole number from ``least`` to ``most``, both included."""

    def number(text: str) -> int:
        if not (text.strip().lstrip("+-").isdecimal() and len(text) < 30 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _amount(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1e6 or abs(round(value, 4) - value) > 1e-9:
        rule = "must be a number from 0 to 1000000 with at most four decimals, which is Ray's precision, such as 0.5"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
    return value


def _gpus(text: str) -> float:
    value = _amount(text)
    if value > 1 and value != int(value):
        raise argparse.ArgumentTypeError(
            f"must be a whole number if it is above 1: Ray only splits a single GPU, got {text!r}"
        )
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 < value <= MAX_S:
        raise argparse.ArgumentTypeError(
            f"must be a finite number of seconds above 0, up to 1e9, such as 30, got {text!r}"
        )
    return value


def _ports(text: str) -> int | tuple[int, int]:
    low, dash, high = text.partition("-")
    if not (low.isdecimal() and (high.isdecimal() or not dash)) or len(text) > 30:
        raise argparse.ArgumentTypeError(f"must be a port such as 29500 or a range such as 29500-29600, got {text!r}")
    return (int(low), int(high)) if dash else int(low)
