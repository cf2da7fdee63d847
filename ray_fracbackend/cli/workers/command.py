"""Shared steps of ``plan`` and ``test``: settings, packages, workers and connection. Imports Ray when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ray_fracbackend.cli.connect.address import ClusterError
from ray_fracbackend.cli.connect.cluster import connected
from ray_fracbackend.cli.imports import import_or_fail
from ray_fracbackend.cli.no_effect import without_effect
from ray_fracbackend.cli.options import check_settings, local_ray, settings_of
from ray_fracbackend.cli.output import say
from ray_fracbackend.cli.program import PROGRAM, CommandError, Outcome, wrong_usage
from ray_fracbackend.errors import FracBackendError


def on_cluster(options: argparse.Namespace, command: Callable[..., Outcome], *, only_plans: bool = False) -> Outcome:
    """Run a command for the workers of the command line, on their cluster.

    Args:
        options: Parsed options of `add_workers`.
        command: Called as ``command(scaling_config, torch_config, timeout_s=..., fixed=...)``.
        only_plans: The command starts no process group.

    Raises:
        CommandError: The command line is wrong, a package is missing, there is no connection, or the command failed.
    """
    check_settings(settings_of(options))
    import_or_fail("torch", "ray")
    scaling_config, torch_config = _workers(options)
    who = f"{PROGRAM} {options.command}"
    for line in without_effect(
        settings_of(options), torch_config.backend, options.gpus_per_worker, only_plans=only_plans
    ):
        say(who, line)
    try:
        with connected(options.address, options.wait_s, local_ray(options)) as own:
            return command(scaling_config, torch_config, timeout_s=options.wait_s, fixed=own)
    except (ClusterError, FracBackendError) as error:
        raise CommandError(error.reason, str(error), ranks=getattr(error, "ranks", ())) from error


def _workers(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return ScalingConfig and FracTorchConfig, checked before Ray is called."""
    from ray.train import ScalingConfig

    from ray_fracbackend.cli.workers.actors import check_plannable
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
        raise wrong_usage(error) from None
    return scaling_config, torch_config
