"""Command ``demo``: the script `ray_fracbackend.cli.demo`."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from ray_fracbackend.cli.options import count
from ray_fracbackend.cli.program import CommandError


def register(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("demo", help="train a small network with two workers at half a GPU each")
    parser.set_defaults(execute=execute)
    parser.add_argument("--stock", action="store_true", help="use Ray's own TorchConfig, for comparison")
    parser.add_argument(
        "--epochs", type=count(10**6), default=10, metavar="NUMBER", help="passes over the data (default 10)"
    )


def execute(options: argparse.Namespace) -> int:
    """Run the command, as ``python -m ray_fracbackend.cli.demo``."""
    if importlib.util.find_spec("sklearn") is None:
        text = "the demo needs a package of the extra 'demo': pip install scikit-learn"
        raise CommandError("missing_package", text)
    from ray_fracbackend.cli.imports import import_or_fail

    import_or_fail("torch", "ray")
    from ray_fracbackend.cli.script import run_as_main

    arguments = ["--epochs", str(options.epochs), *(["--stock"] if options.stock else [])]
    return run_as_main("ray_fracbackend.cli.demo", arguments, is_module=True)
