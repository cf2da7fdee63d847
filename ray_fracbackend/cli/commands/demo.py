"""Command ``demo``: the script `ray_fracbackend.demo`."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from ray_fracbackend.cli.options import count
from ray_fracbackend.cli.output import say
from ray_fracbackend.cli.program import PROGRAM, CommandError

_WHO = f"{PROGRAM} demo"


def register(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("demo", help="train a small network with two workers at half a GPU each")
    parser.set_defaults(execute=execute)
    parser.add_argument("--stock", action="store_true", help="use Ray's own TorchConfig, for comparison")
    parser.add_argument(
        "--epochs", type=count(10**6), default=10, metavar="NUMBER", help="passes over the data (default 10)"
    )


def execute(options: argparse.Namespace) -> int:
    """Run the command, as ``python -m ray_fracbackend.demo``."""
    if importlib.util.find_spec("sklearn") is None:
        text = "the demo needs a package of the extra 'demo': pip install scikit-learn"
        raise CommandError("missing_package", text)
    from ray_fracbackend.cli.imports import import_or_fail

    import_or_fail("torch", "ray")
    from ray_fracbackend.cli.script import run_as_main

    arguments = ["--epochs", str(options.epochs), *(["--stock"] if options.stock else [])]
    after_error = _compare if options.stock else None
    return run_as_main(_WHO, "ray_fracbackend.demo", arguments, is_module=True, after_error=after_error)


def _compare(error: Exception) -> None:
    """Print that FracTorchConfig avoids the error, if it is an error of Ray's start: these name NCCL or CUDA."""
    from ray_fracbackend.cli.progress import root_cause

    # The message of a V1 error only refers to its logs.
    if any(name in f"{error} {root_cause(error)}" for name in ("NCCL", "CUDA")):
        say(
            _WHO,
            f"this error comes from Ray's own TorchConfig; FracTorchConfig avoids it: run {_WHO} without --stock",
        )
