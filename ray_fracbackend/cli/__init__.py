"""Command line ``ray-fracbackend``. Exit code 0: good, 1: a problem was found, 2: wrong usage."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ray_fracbackend import __version__
from ray_fracbackend.decide.settings import Settings, setting_names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

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
    demo.add_argument("--stock", action="store_true", help="use Ray's own TorchConfig, for comparison")
    demo.add_argument("--epochs", type=_positive, default=10, help="passes over the data (default 10)")
    demo.set_defaults(run=_demo)
    bench = commands.add_parser("bench", help="measure the ipc backend beside Gloo, NCCL and Open MPI on this machine")
    bench.add_argument("--ranks", type=_positive, nargs="+", default=[2, 4], help="numbers of processes (default 2 4)")
    bench.add_argument("--sizes", type=_positive, nargs="+", default=None, help="bytes (default 4 KiB to 100 MiB)")
    bench.add_argument(
        "--operations", nargs="+", default=["all_reduce", "ddp_step"], help="(default all_reduce ddp_step)"
    )
    bench.add_argument("--rounds", type=_positive, default=5, help="medians are over all rounds (default 5)")
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default cpu)")
    bench.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    bench.add_argument(
        "--plot", type=Path, default=None, help="also draw a picture, such as bench.png (needs matplotlib)"
    )
    bench.set_defaults(run=_bench)
    plan = commands.add_parser("plan", help="place probe workers on the cluster and print what a start would do")
    plan.add_argument("--num-workers", type=_positive, required=True, help="as in ScalingConfig")
    plan.add_argument("--gpus-per-worker", type=_amount, default=0, help="such as 0.5 (default 0)")
    plan.add_argument("--cpus-per-worker", type=_amount, default=1, help="(default 1)")
    plan.add_argument(
        "--placement-strategy", choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"), default="PACK"
    )
    plan.add_argument(
        "--timeout-s",
        dest="wait_s",
        type=_seconds,
        default=30,
        metavar="SECONDS",
        help="wait for resources (default 30)",
    )
    _add_cluster(plan, "default: the running one that ray.init() finds, else a local one")
    _add_settings(plan)
    plan.set_defaults(run=_plan)
    doctor = commands.add_parser("doctor", help="check this machine, or every node of a cluster")
    doctor.add_argument("--timeout-s", type=_seconds, default=60, metavar="SECONDS", help="wait for nodes (default 60)")
    _add_cluster(doctor, "auto for the one that runs here; default: this machine alone, without Ray")
    doctor.set_defaults(run=_doctor)
    run = commands.add_parser(
        "run",
        help="run an unedited Ray Train script with FracTorchConfig instead of TorchConfig",
        usage="%(prog)s [SETTING ...] SCRIPT [ARGUMENT ...]",
    )
    _add_settings(run)
    run.add_argument("script", metavar="SCRIPT", help="Python script that makes a TorchTrainer")
    run.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own command line")
    run.set_defaults(run=_run)
    return parser


def _add_cluster(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--address", help=f"of a Ray cluster, as ray.init takes it ({default})")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings of FracTorchConfig, each left out unless given; ``--no-NAME`` for those that are on by default."""
    group = parser.add_argument_group("settings of FracTorchConfig")
    for setting in fields(Settings):
        text, choices = setting.metadata["help"], setting.metadata["choices"]
        if not text:
            continue
        kind: dict[str, Any] = {"choices": choices} if choices else {}
        if isinstance(setting.default, bool):
            kind = {"action": "store_false" if setting.default else "store_true"}
        elif isinstance(setting.default, float):
            kind = {"type": float, "metavar": "SECONDS"}
        elif setting.name == "master_port":
            kind = {"type": _ports, "metavar": "PORT"}
        flag = f"--{'no-' if setting.default is True else ''}{setting.name.replace('_', '-')}"
        group.add_argument(flag, dest=setting.name, default=argparse.SUPPRESS, help=text, **kind)


def _ports(text: str) -> int | tuple[int, int]:
    low, dash, high = text.partition("-")
    return (int(low), int(high)) if dash else int(low)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in setting_names() if hasattr(options, name)}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return value


def _demo(options: argparse.Namespace) -> int:
    try:
        import sklearn  # noqa: F401
        import tqdm  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}: pip install 'ray-fracbackend[demo]'", file=sys.stderr)
        return 1
    from ray_fracbackend.cli.cluster import root_cause
    from ray_fracbackend.cli.demo import run_demo

    try:
        accuracy = run_demo(stock=options.stock, epochs=options.epochs)
    except Exception as error:
        root = root_cause(error)
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
    import torch

    from ray_fracbackend.cli import bench
    from ray_fracbackend.cli.bench_ranks import OPERATIONS, SIZES

    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA device here; ray-fracbackend doctor says why", file=sys.stderr)
        return 1
    unknown = [name for name in options.operations if name not in OPERATIONS]
    if unknown:
        print(f"--operations {unknown[0]}: must be one of {', '.join(OPERATIONS)}", file=sys.stderr)
        return 2
    result = bench.measure(
        options.ranks,
        operations=options.operations,
        sizes=options.sizes or SIZES,
        rounds=options.rounds,
        tries=1,
        device=options.device,
    )
    print(json.dumps(result, indent=1) if options.json else bench.table(result["rows"]))
    if options.plot:
        bench.draw(result, options.plot)
    return 0


def _plan(options: argparse.Namespace) -> int:
    settings = _settings(options)
    if (wrong := _wrong(settings)) is not None:
        return wrong
    from ray.train import ScalingConfig

    from ray_fracbackend.cli.cluster import connected
    from ray_fracbackend.cli.plan import plan_workers
    from ray_fracbackend.config import FracTorchConfig
    from ray_fracbackend.errors import FracBackendError

    scaling_config = ScalingConfig(
        num_workers=options.num_workers,
        use_gpu=options.gpus_per_worker > 0,
        resources_per_worker={"CPU": options.cpus_per_worker, "GPU": options.gpus_per_worker},
        placement_strategy=options.placement_strategy,
    )
    try:
        with connected(options.address):
            report = plan_workers(scaling_config, FracTorchConfig(**settings), timeout_s=options.wait_s)
    except (ConnectionError, FracBackendError) as error:
        reason, ranks = getattr(error, "reason", "no_cluster"), list(getattr(error, "ranks", ()))
        found = {"ok": False, "error": {"reason": reason, "message": str(error), "ranks": ranks}}
        print(json.dumps(found, indent=1) if options.json else f"{reason}: {error}", file=sys.stdout)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"ok": True, **report.to_dict()}, indent=1) if options.json else report.to_text())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from ray_fracbackend.cli.doctor import diagnose_cluster, diagnose_machine

    try:
        found = diagnose_machine() if options.address is None else diagnose_cluster(options.address, options.timeout_s)
    except ConnectionError as error:
        print(json.dumps({"ok": False, "error": str(error)}, indent=1) if options.json else error)
        return 1
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(json.dumps(found.to_dict(), indent=1) if options.json else found.to_text(color))
    return 0 if found.ok else 1


def _run(options: argparse.Namespace) -> int:
    settings = _settings(options)
    if (wrong := _wrong(settings)) is not None:
        return wrong
    if not Path(options.script).is_file():
        print(f"SCRIPT {options.script!r} is not a file", file=sys.stderr)
        return 2
    # As python does, and before Ray is imported, which puts a folder of its own first.
    sys.path[0] = os.path.dirname(os.path.realpath(options.script))
    from ray_fracbackend.cli.run import run_script

    run_script(options.script, options.arguments, settings)
    return 0


def _wrong(settings: dict[str, Any]) -> int | None:
    try:
        Settings(**settings)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return None
