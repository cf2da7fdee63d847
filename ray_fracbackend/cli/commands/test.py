"""Command ``test``: start a real group on a cluster, and train a few steps."""

from __future__ import annotations

import argparse
from typing import Any

from ray_fracbackend.cli.options import add_workers
from ray_fracbackend.cli.output import log_lines
from ray_fracbackend.cli.program import CommandError, Outcome


def register(commands: Any) -> None:
    """Add the command's parser."""
    text = "start a real group of workers, verify it, train ten steps"
    parser = commands.add_parser("test", help=text)
    parser.set_defaults(execute=execute)
    add_workers(parser, 2)


def execute(options: argparse.Namespace) -> Outcome:
    """Run the command."""
    from ray_fracbackend.cli.workers.command import on_cluster

    return on_cluster(options, _test)


def _test(*workers: Any, **how: Any) -> Outcome:
    from ray_fracbackend.cli.ddp_steps import run_group_test
    from ray_fracbackend.log import logger

    # The commands start Ray with its log lines turned off.
    with log_lines(logger.logger):
        found = run_group_test(*workers, **how)
    problem = found.problem()
    error = CommandError("wrong_weights", problem, ranks=found.wrong_ranks) if problem else None
    return Outcome(found.to_text(), found.to_dict(), error)
