"""Command ``test``: start a real group on a cluster, and train a few steps."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ray_fracbackend.cli.commands.plan import on_cluster
from ray_fracbackend.cli.options import add_workers
from ray_fracbackend.cli.program import CommandError, Outcome
from ray_fracbackend.decide.worker_info import ranks_text


def register(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("test", help="start a real group of workers, verify it, train ten steps")
    parser.set_defaults(execute=execute)
    add_workers(parser, 2)


def execute(options: argparse.Namespace) -> Outcome:
    """Run the command."""
    return on_cluster(options, _test)


def _test(scaling_config: Any, torch_config: Any, **how: Any) -> Outcome:
    from ray_fracbackend.cli.ddp_steps import train
    from ray_fracbackend.cli.plan import fit

    report, *steps = fit(scaling_config, torch_config, train, **how)
    return outcome(report, sorted(steps))


def outcome(report: Any, steps: Sequence[tuple[float, ...]]) -> Outcome:
    """Return the result of a test.

    Args:
        report: Report of the start.
        steps: As from `train`, by rank.
    """
    _, seconds, first_losses, last_losses, differences = zip(*steps, strict=True)
    # In float64 the only difference comes from the order of the sums. NaN is wrong too.
    wrong = [rank for rank, difference in enumerate(differences) if not difference <= 1e-9]
    text = (
        f"{report.to_text()}\n\n10 DDP steps on {len(steps)} worker{'s' if len(steps) > 1 else ''}: {max(seconds) * 1e3:.2f} ms per "
        f"step, loss {fmean(first_losses):.4f} to {fmean(last_losses):.4f}, largest difference from one process {max(differences):.1g}"
    )
    names = ("step_s", "first_loss", "last_loss", "difference")
    plain = [
        {name: value if math.isfinite(value) else None for name, value in zip(names, each[1:], strict=True)}
        for each in steps
    ]
    error = None
    if wrong:
        problem = (
            f"the weights of {ranks_text(wrong)} differ from those of one process: a collective or a device returns wrong "
            "values. Report it with the output of `ray-fracbackend doctor`, and compare with `--backend gloo`."
        )
        text, error = f"{text}\nproblem: {problem}", CommandError("wrong_weights", problem, ranks=wrong)
    return Outcome(text, {"report": report.to_dict(), "steps": plain}, error)
