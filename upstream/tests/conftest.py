"""Fixtures under the names that they have in Ray's own conftest.py."""

import pytest

import ray


# A cluster for each test: stock Ray keeps the resources of a start that failed.
@pytest.fixture
def ray_start_4_cpus():
    ray.init("local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def ray_start_4_cpus_2_gpus():
    """The GPUs are logical resources, so this works on a machine that has none."""
    ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shared_ray():
    """One cluster with 4 CPUs for all tests of a module."""
    ray.init("local", num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    """The controller looks at its workers often, so that short runs end soon."""
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
