"""The command line ``ray-fracbackend``. Exit code 0: good, 1: a problem was found, 2: wrong usage."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

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
    bench = commands.add_parser("bench", help="measure the ipc backend beside Gloo on this machine")
    bench.add_argument("--ranks", type=_positive, nargs="+", default=[2, 4], help="numbers of processes (default 2 4)")
    bench.add_argument("--sizes", type=_positive, nargs="+", default=None, help="bytes (default 4 KiB to 100 MiB)")
    bench.add_argument(
        "--operations", nargs="+", default=["all_reduce", "ddp_step"], help="(default all_reduce ddp_step)"
    )
    bench.add_argument("--rounds", type=_positive, default=5, help="medians are over all rounds (default 5)")
    bench.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    bench.add_argument(
        "--plot", type=Path, default=None, help="also draw a picture, such as bench.png (needs matplotlib)"
    )
    bench.set_defaults(run=_bench)
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


def _bench(options: argparse.Namespace) -> int:
    from ray_fracbackend.ipc import host_memory_support

    missing = host_memory_support()
    if missing is not None:
        print(f"the ipc backend cannot run here: {missing}", file=sys.stderr)
        return 1
    needed = ["tqdm", "matplotlib"] if options.plot else ["tqdm"]
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if absent:
        print(f"bench needs {', '.join(absent)}: pip install 'ray-fracbackend[bench]'", file=sys.stderr)
        return 1
    from ray_fracbackend import bench
    from ray_fracbackend.ipc.bench import OPERATIONS, SIZES

    unknown = [name for name in options.operations if name not in OPERATIONS]
    if unknown:
        print(f"--operations {unknown[0]}: must be one of {', '.join(OPERATIONS)}", file=sys.stderr)
        return 2
    result = bench.measure(
        options.ranks, operations=options.operations, sizes=options.sizes or SIZES, rounds=options.rounds, tries=1
    )
    print(json.dumps(result, indent=1) if options.json else bench.table(result["rows"]))
    if options.plot:
        bench.draw(result, options.plot)
    return 0


def _root_cause(error: BaseException) -> BaseException:
    """What Ray Train wrapped: its V1 engine says only that the run failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
