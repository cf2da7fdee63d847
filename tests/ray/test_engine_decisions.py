"""What Ray Train V2 does after each error of a start, asked from Ray's own failure policy; the table is in docs/troubleshooting.md."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

import ray_fracbackend
from ray_fracbackend import FracBackendError, WorkerDiedError
from ray_fracbackend._ray import v2_enabled
from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.start.failure.merge import as_engine_error, merged

pytestmark = pytest.mark.skipif(not v2_enabled(), reason="needs the V2 engine of Ray Train")

_PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_ERRORS = sorted(
    {each for name in ray_fracbackend.__all__ if isinstance(each := getattr(ray_fracbackend, name), type)}
    & {each for each in vars(ray_fracbackend.errors).values() if isinstance(each, type)},
    key=lambda each: each.__name__,
)
_NO_LIMIT, _FEW = -1, 2


# What tells the engines apart.
V2_GROUP = SimpleNamespace(get_workers=list)


def decisions(error, controller_failure_limit, num_failures=50):
    """Return the decisions of Ray's policy for a start that always fails with this error (WorkerGroup._start_impl, 2.60)."""
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
    from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
    from ray.train.v2.api.config import FailureConfig
    from ray.train.v2.api.exceptions import ControllerError

    policy = DefaultFailurePolicy(FailureConfig(max_failures=2, controller_failure_limit=controller_failure_limit))
    seen = WorkerGroupStartupFailedError("failed") if isinstance(error, RayActorError) else error
    return [policy.make_decision(ControllerError(seen)).name for _ in range(num_failures)]


def died(cause):
    return merged({0: cause}, [], {0: WorkerAddress(0, "10.0.0.1", 1, "node")}, "starting gloo", 300.0)


@pytest.mark.parametrize(
    "stock", [RayActorError(), OutOfMemoryError("low on memory")], ids=lambda each: type(each).__name__
)
def test_a_dead_worker_as_with_stock(stock):
    """Restarted as often as by stock; if Ray's memory monitor killed it, not at all."""
    ours = as_engine_error(died(stock), V2_GROUP)
    assert isinstance(ours, WorkerDiedError)
    for limit in (_NO_LIMIT, _FEW):
        assert decisions(ours, limit) == decisions(stock, limit)


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: error.__name__)
def test_the_table_on_the_page(error):
    """Each public error has its row with the decision of Ray's policy."""
    engine_error = as_engine_error(error("failed", ranks=[0]), V2_GROUP)
    is_restarted = decisions(engine_error, _NO_LIMIT)[-1] == "RETRY"
    assert decisions(engine_error, _FEW)[: _FEW + 1] == (["RETRY", "RETRY", "RAISE"] if is_restarted else ["RAISE"] * 3)
    does = "restarts the workers" if is_restarted else "ends the run"
    if error is not FracBackendError:
        assert f"| `{error.__name__}` | {does} |" in _PAGE.read_text(encoding="utf-8")
