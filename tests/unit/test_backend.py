"""Ray Train's calls of the backend, without Ray's processes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.train.torch import TorchConfig

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.log import logger
from ray_fracbackend.start.backend import FracTorchBackend
from tests.unit.test_missing_cuda import RELEASES, recorded


def shut_down(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(backend: Any, worker_group: Any, config: Any) -> None:
        raise error

    monkeypatch.setattr(TorchConfig().backend_cls, "on_shutdown", fail)
    FracTorchBackend().on_shutdown(None, FracTorchConfig())


@pytest.mark.parametrize("release", RELEASES)
def test_a_worker_that_fails_in_the_shutdown_does_not_hide_the_cause(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray empties torch's cache in the shutdown, which fails in a worker that has lost its GPU."""
    error = RayTaskError("_shutdown_torch", "<traceback>", RuntimeError(recorded("device_lost", release)))
    with caplog.at_level(logging.WARNING, logger.name):
        shut_down(monkeypatch, error)
    assert [record.getMessage() for record in caplog.records] == [
        "ray_fracbackend: a worker failed while its process group was shut down: CUDA error: unspecified launch failure"
    ]


def test_other_errors_of_the_shutdown_are_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example the death of a worker, which Ray handles itself."""
    with pytest.raises(GetTimeoutError):
        shut_down(monkeypatch, GetTimeoutError("late"))
