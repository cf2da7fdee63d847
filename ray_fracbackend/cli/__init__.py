"""Command line ``ray-fracbackend``.

Exit code 0: good, 1: a problem was found, 2: wrong usage; 128 plus the signal's number where a signal ended it. Results are on
standard output, errors on standard error, with ``--json`` both as one document on standard output.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ray_fracbackend.cli.arguments import PROGRAM, UsageError, parser, setting_options, settings_of
from ray_fracbackend.cli.ending import emit, say, stopping, to_its_end
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.errors import FracBackendError


class _Failure(Exception):
    """Why a command fails, for one line or one document."""

    def __init__(self, reason: str, message: str, *, ranks: Sequence[int] = (), code: int = 1) -> None:
        super().__init__(message)
        self.reason, self.ranks, self.code = reason, list(ranks), code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Command line without the program's name, by default that of the process.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    return to_its_end(PROGRAM, lambda: _main(words))


def _main(words: Sequence[str]) -> int:
    try:
        options = parser().parse_args(words)
    except UsageError as error:
        if "--json" in words and "run" not in words:  # a script's own options come after run
            _emit_error(_wrong_usage(error))
        else:
            sys.stderr.write(f"{error.usage}{error.program}: error: {error}\n")
        return 2
    return _command(options)


def _command(options: argparse.Namespace) -> int:
    run, packages = _COMMANDS[options.command]
    try:
        _check_settings(options)
        if options.command == "run":
            _find_script(options)
        with stopping():
            for name in packages:
                _import(name)
            if options.command != "run":
                return run(options)
        # A script has Python's own handlers, or sets others.
        return run(options)
    except _Failure as failure:
        if getattr(options, "json", False):
            _emit_error(failure)
        else:
            say(f"{PROGRAM} {options.command}", str(failure))
        return failure.code


def _emit_error(failure: _Failure) -> None:
    error = {"reason": failure.reason, "message": str(failure), "ranks": failure.ranks}
    emit(json.dumps({"ok": False, "error": error}, indent=1))


def _check_settings(options: argparse.Namespace) -> None:
    try:
        Settings(**settings_of(options))
    except ValueError as error:
        raise _wrong_usage(error) from None


def _wrong_usage(error: object) -> _Failure:
    return _Failure("wrong_usage", str(error), code=2)


def _import(name: str) -> None:
    """Import a package that the command needs; it may be there and broken, such as a torch for another driver."""
    try:
        importlib.import_module(name)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        text = f"{name} cannot be imported ({cause}); {PROGRAM} doctor names what is missing and what to install"
        raise _Failure("missing_package", text) from None


def _needs(extra: str, *packages: str) -> None:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        names = {"sklearn": "scikit-learn"}
        listed = " ".join(names.get(name, name) for name in absent)
        raise _Failure("missing_package", f"it needs packages of the extra {extra!r}: pip install {listed}")


def _doctor(options: argparse.Namespace) -> int:
    from ray_fracbackend.cli.doctor import diagnose_cluster, diagnose_machine

    if options.address is None:
        found = diagnose_machine(options.wait_s)
    else:
        found = _answer(lambda: diagnose_cluster(options.address, options.wait_s))
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    emit(json.dumps(found.to_dict(), indent=1) if options.json else found.to_text(color))
    return 0 if found.ok else 1


def _answer(call: Callable[[], Any]) -> Any:
    """Return what a call on a cluster returns; its errors have a reason of their own."""
    from ray_fracbackend.cli.cluster import ClusterError

    try:
        return call()
    except (ClusterError, FracBackendError) as error:
        raise _Failure(error.reason, str(error), ranks=getattr(error, "ranks", ())) from error


def _plan(options: argparse.Namespace) -> int:
    from ray_fracbackend.cli.plan import plan_workers

    report = _on_cluster(options, plan_workers)
    emit(report.to_json() if options.json else report.to_text())
    return 0


def _test(options: argparse.Namespace) -> int:
    from ray_fracbackend.cli.group_test import run_group_test

    result = _on_cluster(options, run_group_test)
    emit(json.dumps(result.to_dict(), indent=1) if options.json else result.to_text())
    return 0 if result.ok else 1


def _on_cluster(options: argparse.Namespace, call: Callable[..., Any]) -> Any:
    """Return what the call returns for the workers of the command line, on their cluster."""
    from ray_fracbackend.cli.cluster import connected

    scaling_config, torch_config = _workers(options)

    def on_cluster() -> Any:
        with connected(options.address, options.wait_s) as own:
            return call(scaling_config, torch_config, timeout_s=options.wait_s, fixed=own)

    return _answer(on_cluster)


def _workers(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return ScalingConfig and FracTorchConfig of `plan` and `test`, checked before any Ray is asked."""
    from ray.train import ScalingConfig

    from ray_fracbackend.cli.probe_workers import check_plannable
    from ray_fracbackend.config import FracTorchConfig

    try:
        scaling_config = ScalingConfig(
            num_workers=options.num_workers,
            use_gpu=options.gpus_per_worker > 0,
            resources_per_worker={"CPU": options.cpus_per_worker, "GPU": options.gpus_per_worker},
            placement_strategy=options.placement_strategy,
        )
        torch_config = FracTorchConfig(**settings_of(options))
        check_plannable(scaling_config, torch_config)
    except ValueError as error:
        raise _wrong_usage(error) from None
    return scaling_config, torch_config


def _run(options: argparse.Namespace) -> int:
    from ray_fracbackend.cli.run import run_script

    if misplaced := sorted(set(setting_options().values()) & {word.partition("=")[0] for word in options.arguments}):
        say(f"{PROGRAM} run", f"{', '.join(misplaced)} after the script goes to the script; settings stand before it")
    return run_script(options.script, options.arguments, settings_of(options), is_module=options.module)


def _find_script(options: argparse.Namespace) -> None:
    """Put the script's folder first in sys.path, as python does, and before Ray is imported, which puts one of its own there."""
    if options.module:
        sys.path[0] = os.getcwd()
        try:
            found = importlib.util.find_spec(options.script) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise _wrong_usage(f"-m {options.script}: there is no such module")
        return
    if not os.path.isfile(options.script):
        raise _wrong_usage(f"SCRIPT {options.script!r} is not a file")
    sys.path[0] = os.path.dirname(os.path.realpath(options.script))


def _demo(options: argparse.Namespace) -> int:
    _needs("demo", "sklearn", "tqdm")
    from ray_fracbackend.cli.cluster import root_cause
    from ray_fracbackend.cli.demo import run_demo

    try:
        accuracy = run_demo(stock=options.stock, epochs=options.epochs)
    except Exception as error:
        root = root_cause(error)
        if isinstance(root, BrokenPipeError):  # Tune prints too, under V1; where it was another pipe, this goes through
            emit("")
        raise _Failure("training", f"training failed: {type(root).__name__}: {root}") from error
    if accuracy <= 0.9 and options.epochs >= 10:
        raise _Failure("training", f"accuracy {accuracy:.3f} after {options.epochs} epochs: it must be above 0.9")
    return 0


# What runs a command, and the packages that it imports first.
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], tuple[str, ...]]] = {
    "doctor": (_doctor, ()),
    "test": (_test, ("torch", "ray")),
    "plan": (_plan, ("torch", "ray")),
    "run": (_run, ("torch", "ray")),
    "demo": (_demo, ("torch", "ray")),
}
