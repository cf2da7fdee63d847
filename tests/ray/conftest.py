"""A real local Ray for all tests of a process, and helpers to run workers on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.train._internal.worker_group import WorkerGroup

from ray_fracbackend.decide.plan import Decision, FallBack
from tests.processes import python_path
from tests.ray.starts import stop

# For this process and all processes of its tests: otherwise V2's controller polls its workers only every 2 s, and one more process of each
# run waits for preemptions that never come.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Libraries that would download something fail instead.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HALF_GPU = {"CPU": 1, "GPU": 0.5}
ONE_CPU = {"CPU": 1}
_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster():
    """A local Ray with logical CPUs and GPUs. Later modules use the same one, unless one between them starts its own."""
    if not ray.is_initialized():
        ray.init("local", num_cpus=32, num_gpus=2, include_dashboard=False, log_to_driver=False)


@pytest.fixture(scope="module")
def no_cluster():
    """For a module that starts its own Ray: no Ray before it and none after it."""
    ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture
def make_group(cluster):
    """Create worker groups of real actors, and end them after the test."""
    groups = []

    def make(num_workers=2, resources=None):
        groups.append(WorkerGroup(num_workers=num_workers, resources_per_worker=resources or ONE_CPU))
        # These tests do not limit the time to import torch in many processes at once on a small machine.
        groups[-1].execute(import_package)
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown(patience_s=0)


def import_package():
    """Import in a worker what a start needs."""
    import ray_fracbackend.worker.process_group  # noqa: F401


def warm_workers(resources, num_workers=2):
    """Workers that have imported what a start needs."""
    group = WorkerGroup(num_workers=num_workers, resources_per_worker=resources)
    group.execute(import_package)
    yield group
    group.shutdown(patience_s=0)


@pytest.fixture(scope="module")
def two_workers(cluster):
    yield from warm_workers(ONE_CPU)


@pytest.fixture(scope="module")
def three_workers(cluster):
    yield from warm_workers(ONE_CPU, 3)


@pytest.fixture
def pair(two_workers):
    """Two workers that the module's tests share, without a group and without variables of a start."""
    yield two_workers
    stop(two_workers)
    two_workers.execute(forget_address)


@pytest.fixture
def first_choice(monkeypatch):
    """Have the starts of this process decide for a backend, by default Gloo as part of a pair, with Gloo as the fallback."""

    def decide(backend="cpu:gloo", **changes):
        fallback = {"fallback": "gloo", "falls_back": FallBack.AFTER_FAILURE}
        plan = Decision(**{"backend": backend, "device_type": "cpu", "reason": "first choice", **fallback, **changes})
        monkeypatch.setattr("ray_fracbackend.start.backend.decide_start", lambda *args: plan)

    return decide


def forget_address():
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def run_example(name, *arguments):
    """Run a script of examples/ as a user would, in a process with its own Ray."""
    command = [sys.executable, _ROOT / "examples" / name, *arguments]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
