"""Command ``plan``: print what a start would do on a cluster."""

from __future__ import annotations

import argparse
from typing import Any

from ray_fracbackend.cli.options import add_workers
from ray_fracbackend.cli.program import Outcome


def register(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("plan", help="print what a start would do on a cluster, without training")
    parser.set_defaults(execute=execute)
    add_workers(parser, None)


def execute(options: argparse.Namespace) -> Outcome:
    """Run the command."""
    from ray_fracbackend.cli.workers.command import on_cluster

    return on_cluster(options, _plan, only_plans=True)


def _plan(*workers: Any, **how: Any) -> Outcome:
    from ray_fracbackend.cli.plan import plan_workers

    report = plan_workers(*workers, **how)
    return Outcome(report.to_text(), report.to_dict())
