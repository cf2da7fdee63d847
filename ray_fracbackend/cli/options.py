"""Options that several commands have, and the types of their values. Standard library only."""

from __future__ import annotations

import argparse
from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ray_fracbackend.cli.program import wrong_usage
from ray_fracbackend.decide.settings import Settings, is_seconds, setting_names

# Ray itself tests clusters with this number of actors; each worker is an actor.
MAX_WORKERS = 10_000
# More than any machine has.
MAX_DECLARED = 10_000

# --timeout-s limits how long plan and test wait for cluster and resources.
_OTHER_NAMES = {"timeout_s": "collective_timeout_s"}


def add_workers(command: argparse.ArgumentParser, num_workers: int | None) -> None:
    """Add the options that `plan` and `test` share: workers, cluster, settings."""
    text = "number of workers, as for ScalingConfig" + (f" (default {num_workers})" if num_workers else "")
    number: dict[str, Any] = {"default": num_workers, "required": num_workers is None, "metavar": "NUMBER"}
    of_worker: dict[str, Any] = {"type": amount, "metavar": "AMOUNT"}
    strategies = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    command.add_argument("--num-workers", type=count(MAX_WORKERS), help=text, **number)
    command.add_argument(
        "--gpus-per-worker", default=0, help="GPUs of each worker, such as 0.5 (default 0)", **of_worker
    )
    command.add_argument("--cpus-per-worker", default=1, help="CPUs of each worker (default 1)", **of_worker)
    text = "as for ScalingConfig (default PACK)"
    command.add_argument("--placement-strategy", choices=strategies, default="PACK", help=text)
    add_wait(command, 30.0, "how long to wait for cluster and resources")
    add_cluster(command, "default: the cluster of RAY_ADDRESS or of this machine, else a new local one")
    add_local_ray(command, "this command")
    add_settings(command)


def add_wait(command: argparse.ArgumentParser, default: float, what: str) -> None:
    """Add ``--timeout-s``."""
    text = f"{what} (default {default:g})"
    command.add_argument("--timeout-s", dest="wait_s", type=seconds, default=default, metavar="SECONDS", help=text)


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
    hints = get_type_hints(Settings)
    for setting in fields(Settings):
        kind = _kind(hints[setting.name], setting)
        group.add_argument(_flag(setting), dest=setting.name, default=SUPPRESS, **kind, **setting.metadata)


def _kind(hint: Any, setting: Field[Any]) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a setting's type; `Settings` checks the value."""
    if hint is bool:
        return {"action": "store_false" if setting.default else "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    metavar = "SECONDS" if setting.name.endswith("_s") else setting.name.split("_")[-1].upper()
    of = get_args(hint) or (hint,)
    found = [convert for kind, convert in ((tuple[int, int], ports), (int, int), (float, float)) if kind in of]
    return {"metavar": metavar, "type": found[0] if found else str}


def _flag(setting: Field[Any]) -> str:
    name = _OTHER_NAMES.get(setting.name, setting.name)
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
        if not (text.isdecimal() and len(text) < 30 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return number


def amount(text: str) -> float:
    """Convert an amount of a resource."""
    value = float(text)
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1000000, such as 0.5, got {text!r}")
    return value


def seconds(text: str) -> float:
    """Convert a time limit."""
    value = float(text)
    if not is_seconds(value):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, up to 1e9, such as 30, got {text!r}")
    return value


def ports(text: str) -> int | tuple[int, int]:
    """Convert a port, or a range of ports."""
    low, dash, high = text.partition("-")
    return (int(low), int(high)) if dash else int(low)
