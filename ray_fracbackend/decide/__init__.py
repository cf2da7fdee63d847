"""The decision on a start: pure functions over what the workers reported. Standard library only.

`decide_start` is the way in: the table decides on backend and devices, the rendezvous on addresses and interfaces, and each
worker gets its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray_fracbackend.decide.plan import StartPlan, WorkerPlan
from ray_fracbackend.decide.rendezvous import plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import plan_start
from ray_fracbackend.decide.worker_info import WorkerInfo


def decide_start(
    workers: Sequence[WorkerInfo], settings: Settings, node_gpus: Mapping[str, float] | None = None
) -> tuple[StartPlan, list[WorkerPlan]]:
    """Decide how to start a job.

    Args:
        workers: Every rank, in rank order, at least one; rank 0 holds a store open.
        settings: What the user asked for.
        node_gpus: GPUs that Ray gives out on each node, by Ray's node id; for hints.

    Returns:
        The plan of the job, and the part of each worker in it, by rank.

    Raises:
        FracBackendError: The job cannot start like this; see `table.plan_start` and `rendezvous.plan_rendezvous`.
    """
    return with_rendezvous(plan_start(workers, settings, node_gpus), workers, settings)


def with_rendezvous(
    plan: StartPlan, workers: Sequence[WorkerInfo], settings: Settings
) -> tuple[StartPlan, list[WorkerPlan]]:
    """Add the rendezvous to a plan that has none, such as that of a fallback; the rest is as in `decide_start`."""
    plan = replace(plan, rendezvous=plan_rendezvous(workers, settings, plan.backend))
    return plan, plan.worker_plans(workers, settings)
