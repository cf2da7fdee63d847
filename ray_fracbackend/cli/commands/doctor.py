"""Command ``doctor``: check this machine, or every node of a cluster. It imports neither torch nor Ray, because they may be broken."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ray_fracbackend.cli.imports import import_or_fail
from ray_fracbackend.cli.options import add_cluster, add_wait
from ray_fracbackend.cli.program import CommandError, Outcome
from ray_fracbackend.timeouts import Deadline


def register(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("doctor", help="check this machine, or every node of a cluster")
    parser.set_defaults(execute=execute)
    add_wait(parser, 60.0, "time limit for the whole command")
    add_cluster(parser, "auto for the cluster of this machine; default: check only this machine, without Ray")


def execute(options: argparse.Namespace) -> Outcome:
    """Run the command."""
    from ray_fracbackend.cli.cluster import connected
    from ray_fracbackend.cli.doctor.diagnose import diagnose_cluster, diagnose_machine
    from ray_fracbackend.cli.doctor.report import report, verdict

    if options.address is None:
        nodes = diagnose_machine(options.wait_s)
    else:
        deadline = Deadline(options.wait_s)
        import_or_fail("ray")
        with connected(options.address, deadline.left_s):
            nodes = diagnose_cluster(deadline.left_s)
    has_problem = any(check.level == "problem" for node in nodes for check in node.checks)
    failure = CommandError("problem_found", verdict(nodes)) if has_problem else None
    return Outcome(report(nodes), {"nodes": [asdict(node) for node in nodes]}, failure)
