"""Runs of the commands ``plan`` and ``test``: a TorchTrainer whose backend sends its report. Driver, controller and workers.

The workers report no checkpoint, so other nodes need no access to the storage, a temporary folder on the driver's node.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayTaskError
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.util.queue import Queue

from ray_fracbackend import _ray
from ray_fracbackend.cli.placement import bundles_of, check_placement
from ray_fracbackend.config import FracTorchConfig
from ray_fracbackend.decide.left_to_ray import left_to_ray
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.report.start_report import StartReport
from ray_fracbackend.start.backend import FracTorchBackend, Start


def plan_workers(
    scaling_config: ScalingConfig,
    torch_config: FracTorchConfig | None = None,
    *,
    timeout_s: float = 30.0,
    fixed: bool = False,
) -> StartReport:
    """Place workers as a training run does, and plan their start.

    Needs a connection to Ray. Trains nothing, starts no process group, and leaves no actor and no placement group behind.

    Args:
        scaling_config: As for a TorchTrainer, with a fixed number of workers of at least 1.
        torch_config: The settings, by default those of ``FracTorchConfig()``.
        timeout_s: How long to wait for the resources, in seconds. Then ``start_timeout_s`` of the settings is the time
            limit.
        fixed: No autoscaler adds nodes to this cluster: workers that cannot fit are an error at once.

    Returns:
        The report of that start without measurements (share map, decision, reasons).

    Raises:
        InsufficientResourcesError: The cluster has not placed the workers in time.
        FracBackendError: The start would fail; the message contains the reason and the next step.
        ValueError: There is nothing to plan: the number of workers is not fixed, or the start is left to Ray.
    """
    report: StartReport = fit(scaling_config, torch_config or FracTorchConfig(), timeout_s=timeout_s, fixed=fixed)[0]
    return report


def check_plannable(scaling_config: ScalingConfig, torch_config: FracTorchConfig) -> None:
    """Check that there are workers to place and that this package starts them; needs no Ray.

    Raises:
        ValueError: One of these is not the case.
    """
    num_workers = scaling_config.num_workers
    if not isinstance(num_workers, int) or num_workers < 1:
        raise ValueError(f"ScalingConfig(num_workers={num_workers!r}): a plan needs a fixed number of at least 1.")
    bundles = bundles_of(scaling_config)
    if len(bundles) < num_workers:  # V1's trainer adds to the first one only
        raise ValueError("a plan needs workers with resources: request CPUs or GPUs for them.")
    if left := left_to_ray(torch_config.backend, bundles[-1]):
        raise ValueError(f"{left}: there is nothing to plan or to test.")


def fit(
    scaling_config: ScalingConfig,
    torch_config: FracTorchConfig,
    train: Callable[[dict[str, Any]], None] | None = None,
    *,
    timeout_s: float = 30.0,
    fixed: bool = False,
) -> list[Any]:
    """Run a TorchTrainer, and return the report of its start and what the train function has put into ``config["results"]``.

    Args:
        scaling_config, torch_config, timeout_s, fixed: As for `plan_workers`, as are the errors.
        train: Train function; None to only plan the start.
    """
    check_plannable(scaling_config, torch_config)
    check_placement(scaling_config, timeout_s, is_own=fixed)
    config = _Config(**torch_config.to_plain())
    config.results, config.only_plans = Queue(actor_options={"num_cpus": 0}), train is None
    _ray.leave_sigint_to_python(_Trainer)
    with tempfile.TemporaryDirectory(prefix="ray_fracbackend") as folder:
        try:
            _Trainer(
                train or _nothing,
                train_loop_config={"results": config.results},
                scaling_config=scaling_config,
                torch_config=config,
                run_config=RunConfig(storage_path=folder),
            ).fit()
            return list(config.results.get_nowait_batch(config.results.qsize()))
        except Exception as error:
            cause = _root_cause(error)
            if isinstance(cause, FracBackendError):
                raise cause from None
            raise FracBackendError(f"the run failed ({type(cause).__name__}): {cause}") from error
        finally:
            config.results.shutdown(force=True)


def _root_cause(error: BaseException) -> BaseException:
    """Unwrap an error of Ray: a task's own error, that of V2's controller, or the cause of V1's."""
    inner = (
        error.cause if isinstance(error, RayTaskError) else getattr(error, "controller_failure", None)
    ) or error.__cause__
    return _root_cause(inner) if inner is not None else error


def _nothing(config: dict[str, Any]) -> None:
    pass


class _Trainer(TorchTrainer):  # type: ignore[misc]
    """A trainer during which Ctrl-C is the command's."""


class _Backend(FracTorchBackend):
    """Start the group, or only plan it, and send the report to the driver. A start that fails is not tried again."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        start = Start(worker_group, backend_config.checked_copy())
        try:
            report = start.plan() if backend_config.only_plans else start.run()
        except BaseException as error:
            _ray.release_workers(worker_group, error)
            raise
        backend_config.results.put(report)


class _Config(FracTorchConfig):
    """Configuration of such a run.

    Attributes:
        results: Queue of the driver.
        only_plans: Do not start the process group.
    """

    results: Queue
    only_plans: bool

    @property
    def backend_cls(self) -> type[_Backend]:
        """Ray Train backend class of this configuration."""
        return _Backend
