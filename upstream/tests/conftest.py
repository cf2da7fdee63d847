"""Fixtures with the same names as in Ray's own conftest.py."""

import pytest

import ray


# One cluster per test: stock Ray keeps the resources of a failed start.
@pytest.fixture
def ray_start_4_cpus():
    ray.init("local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def ray_start_4_cpus_2_gpus():
    """Start a cluster with logical GPUs; no real GPU is needed."""
    ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shared_ray():
    """Start one cluster with 4 CPUs for all tests of a module."""
    ray.init("local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    """Let the controller poll its workers often, so short runs end soon."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
