"""Command ``run``: run an unedited script with FracTorchConfig in its trainers."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any

from ray_fracbackend.cli.options import (
    add_local_ray,
    add_settings,
    check_settings,
    local_ray,
    setting_options,
    settings_of,
)
from ray_fracbackend.cli.output import say
from ray_fracbackend.cli.program import PROGRAM, CommandError, wrong_usage

_WHO = f"{PROGRAM} run"


def register(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "run",
        help="run a Ray Train script, unedited, with FracTorchConfig",
        usage="%(prog)s [OPTION ...] [-m] SCRIPT [ARGUMENT ...]",
    )
    parser.set_defaults(execute=execute)
    add_local_ray(parser, "the script")
    add_settings(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as after python -m")
    parser.add_argument("script", metavar="SCRIPT", help="Python script that makes a TorchTrainer")
    rest = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own command line"
    )
    rest.required = False  # else argparse reports it as missing together with SCRIPT


def execute(options: argparse.Namespace) -> int:
    """Run the command. The script keeps Python's signal handlers, or sets its own."""
    settings = settings_of(options)
    check_settings(settings)
    find_script(options.script, options.module)
    from ray_fracbackend.cli.imports import import_or_fail

    import_or_fail("torch", "ray")
    from ray_fracbackend.cli.script import run_script

    own = {*setting_options().values(), "--num-gpus", "--num-cpus"}
    if misplaced := sorted(own & {word.partition("=")[0] for word in options.arguments}):
        say(_WHO, f"{', '.join(misplaced)} went to your script; put it before the script name to set it here")
    return run_script(
        options.script, options.arguments, settings, is_module=options.module, declared=local_ray(options)
    )


def find_script(script: str, is_module: bool) -> None:
    """Put the script's folder first in sys.path, as python does. Call it before Ray is imported, which adds its own folder.

    Args:
        script: Path of the script, or name of the module.
        is_module: As ``python -m``.

    Raises:
        CommandError: There is no such script, or a package of the module cannot be imported.
    """
    if not is_module and not os.path.isfile(script):
        raise wrong_usage(f"SCRIPT {script!r} is not a file")
    # With PYTHONSAFEPATH or -P python does not add the folder, and the first entry is another one.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))
    if is_module:
        _find_module(script)


def _find_module(name: str) -> None:
    """Find a module; this imports its parent packages."""
    try:
        found = None if not name or name.startswith(".") else importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # a parent package needs another module
            raise _broken(name, error) from None
        found = None
    except Exception as error:
        raise _broken(name, error) from None
    if found is None:
        raise wrong_usage(f"-m {name}: there is no such module")


def _broken(name: str, error: Exception) -> CommandError:
    package = name.rpartition(".")[0]
    return CommandError(
        "missing_package", f"-m {name}: its package {package} cannot be imported ({type(error).__name__}: {error})"
    )
