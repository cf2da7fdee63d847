"""Command ``plan``: plan a start for a ScalingConfig on a real cluster, without training. Runs on the driver."""

from __future__ import annotations

from ray.train import ScalingConfig

from ray_fracbackend.backend import Start
from ray_fracbackend.cli.workers.actors import check_plannable, probe_workers
from ray_fracbackend.config import FracTorchConfig
from ray_fracbackend.report import StartReport


def plan_workers(
    scaling_config: ScalingConfig,
    torch_config: FracTorchConfig | None = None,
    *,
    timeout_s: float = 30.0,
    fixed: bool = False,
) -> StartReport:
    """Place probe workers with the bundles and strategy of a training run, and plan their start.

    Needs a connection to Ray. Trains nothing, starts no process group, and leaves no actor and no placement group behind.

    Args:
        scaling_config: As for a TorchTrainer, with a fixed number of workers of at least 1.
        torch_config: The settings, by default those of ``FracTorchConfig()``.
        timeout_s: How long to wait for the resources, in seconds. Then ``start_timeout_s`` of the settings is the time
            limit.
        fixed: No autoscaler adds nodes to this cluster: workers that cannot fit are an error at once.

    Returns:
        The report of that start without measurements (share map, decision, reasons); a table in notebooks.

    Raises:
        InsufficientResourcesError: The cluster has not placed the workers in time.
        FracBackendError: The start would fail; the message contains the reason and the next step.
        ValueError: There is nothing to plan: the number of workers is not fixed, or the start is left to Ray.
    """
    settings = (torch_config or FracTorchConfig()).checked_copy()
    check_plannable(scaling_config, settings)
    with probe_workers(scaling_config, settings, timeout_s, fixed) as group:
        return Start(group, settings).plan()
