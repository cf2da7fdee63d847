"""Command ``plan``: print what a start would do on a cluster; and the steps that it shares with ``test``."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from ray_fracbackend.cli.cluster import connected
from ray_fracbackend.cli.imports import import_or_fail
from ray_fracbackend.cli.options import add_workers, check_settings, local_ray, settings_of
from ray_fracbackend.cli.program import CommandError, Outcome, wrong_usage
from ray_fracbackend.errors import FracBackendError


def register(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("plan", help="print what a start would do on a cluster, without training")
    parser.set_defaults(execute=execute)
    add_workers(parser, None)


def execute(options: argparse.Namespace) -> Outcome:
    """Run the command."""
    return on_cluster(options, _plan)


def _plan(*workers: Any, **how: Any) -> Outcome:
    from ray_fracbackend.cli.plan import plan_workers

    report = plan_workers(*workers, **how)
    return Outcome(report.to_text(), report.to_dict())


def on_cluster(options: argparse.Namespace, command: Callable[..., Outcome]) -> Outcome:
    """Run ``command(scaling_config, torch_config, timeout_s=..., fixed=...)`` for the options of `add_workers`, on their cluster.

    Args:
        options: Parsed options.
        command: The command.
    """
    settings = settings_of(options)
    check_settings(settings)
    import_or_fail("torch", "ray")
    from ray.train import ScalingConfig

    from ray_fracbackend.cli.plan import check_plannable
    from ray_fracbackend.config import FracTorchConfig

    try:
        scaling_config = ScalingConfig(
            num_workers=options.num_workers,
            use_gpu=options.gpus_per_worker > 0,
            resources_per_worker={"CPU": options.cpus_per_worker, "GPU": options.gpus_per_worker},
            placement_strategy=options.placement_strategy,
        )
        torch_config = FracTorchConfig(**settings)
        check_plannable(scaling_config, torch_config)
    except ValueError as error:
        raise wrong_usage(error) from None
    # Tune (V1) prints tables to standard output.
    try:
        with connected(options.address, options.wait_s, local_ray(options)) as own, redirect_stdout(io.StringIO()):
            return command(scaling_config, torch_config, timeout_s=options.wait_s, fixed=own)
    except FracBackendError as error:
        raise CommandError(error.reason, str(error), ranks=error.ranks) from error
