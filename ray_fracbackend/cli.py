"""The command line ``ray-fracbackend``. Exit code 0: good, 1: a problem was found, 2: wrong usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ray_fracbackend import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Command line without the program's name, by default that of the process.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ray-fracbackend", description="Ray Train on fractions of a GPU.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    demo = commands.add_parser("demo", help="train a small network with two workers at half a GPU each")
    demo.add_argument("--stock", action="store_true", help="use Ray's own TorchConfig, to see what it does")
    demo.add_argument("--epochs", type=_positive, default=10, help="passes over the data (default 10)")
    demo.set_defaults(run=_demo)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _demo(options: argparse.Namespace) -> int:
    try:
        import sklearn  # noqa: F401
        import tqdm  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}: pip install 'ray-fracbackend[demo]'", file=sys.stderr)
        return 1
    from ray_fracbackend.demo import run_demo

    try:
        accuracy = run_demo(stock=options.stock, epochs=options.epochs)
    except Exception as error:
        root = _root_cause(error)
        print(f"training failed: {type(root).__name__}: {root}", file=sys.stderr)
        return 1
    return 0 if accuracy > 0.9 or options.epochs < 10 else 1


def _root_cause(error: BaseException) -> BaseException:
    """What Ray Train wrapped: its V1 engine says only that the run failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
