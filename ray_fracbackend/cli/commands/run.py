"""Command ``run``: run an unedited script with FracTorchConfig in its trainers."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ray_fracbackend.cli.options import add_local_ray, add_settings, check_settings, local_ray, settings_of
from ray_fracbackend.cli.program import wrong_usage


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
    """Run the command."""
    settings, script = settings_of(options), options.script
    check_settings(settings)
    if not options.module and not os.path.isfile(script):
        raise wrong_usage(f"SCRIPT {script!r} is not a file")
    # As with python, the script's folder is first; Ray adds its own folder before it when it is imported.
    sys.path.insert(0, os.getcwd() if options.module else os.path.dirname(os.path.realpath(script)))
    from ray_fracbackend.cli.imports import import_or_fail

    import_or_fail("torch", "ray")
    from ray_fracbackend.cli.script import run_script

    return run_script(script, options.arguments, settings, is_module=options.module, resources=local_ray(options))
