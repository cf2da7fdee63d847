"""Command ``doctor``: check this machine, or every node of a cluster. It imports neither torch nor Ray, because they may be broken."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ray_fracbackend.cli.options import add_cluster, add_wait
from ray_fracbackend.cli.program import CommandError, Outcome

_WAIT_S = 60.0


def register(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("doctor", help="check this machine, or every node of a cluster")
    parser.set_defaults(execute=execute)
    add_wait(parser, _WAIT_S, "time limit for the whole command")
    add_cluster(parser, "auto for the cluster of this machine; default: check only this machine, without Ray")


def execute(options: argparse.Namespace) -> Outcome:
    """Run the command."""
    from ray_fracbackend.cli.connect.address import ClusterError
    from ray_fracbackend.cli.doctor.diagnose import diagnose_cluster, diagnose_machine

    if options.address is None:
        found = diagnose_machine(options.wait_s)
    else:
        try:
            found = diagnose_cluster(options.address, options.wait_s)
        except ClusterError as error:
            raise CommandError(error.reason, str(error)) from error
    color = sys.stdout is not None and sys.stdout.isatty() and os.name != "nt" and not os.environ.get("NO_COLOR")
    problems = found.problems()
    failure = CommandError("problem_found", "; ".join(problems)) if problems else None
    return Outcome(found.to_text(color), found.to_dict(), failure)
