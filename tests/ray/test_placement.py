"""ray-fracbackend plan: real workers on a real local Ray, with the engine of RAY_TRAIN_V2_ENABLED."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import ray
import torch
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group_table

from ray_fracbackend import FracTorchConfig, InsufficientResourcesError, MissingDeviceError
from ray_fracbackend.cli.plan import plan_workers
from tests.processes import actor_processes, wait_until
from tests.ray.conftest import HALF_GPU

COMMAND = [sys.executable, "-m", "ray_fracbackend", "plan"]
HALVES = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=HALF_GPU)


def plan(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=250, check=False)


def nothing_is_left():
    """Whether no placement group and no process of a run is left."""
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return not groups and not actor_processes("RayTrainWorker") and not actor_processes("QueueActor")


@pytest.mark.full
def test_plan(cluster):
    """Two workers with half a GPU: real placement, decision and text; nothing is left."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the gpu suite plans on it")
    report = plan_workers(HALVES, FracTorchConfig(on_missing_cuda="cpu"))
    assert report.backend == "gloo"
    assert report.verification is None
    found = [(worker.rank, worker.gpu_fraction, worker.gpu_ids) for worker in report.workers]
    assert found == [(0, 0.5, ("0",)), (1, 0.5, ("0",))]
    assert len({worker.pid for worker in report.workers}) == 2
    assert "not verified" in report.to_text()
    assert report.to_text().count("0.5 GPU, cpu\n") == 2
    assert wait_until(nothing_is_left)


@pytest.mark.full
def test_a_start_that_would_fail(cluster):
    """The plan fails like the start, and also leaves nothing."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: nothing is missing")
    with pytest.raises(MissingDeviceError, match="on_missing_cuda='cpu'"):
        plan_workers(ScalingConfig(num_workers=1, use_gpu=True, resources_per_worker=HALF_GPU))
    assert wait_until(nothing_is_left)


def test_too_few_places(cluster):
    """The error has the request, the nodes and what fits them; it comes at once if no node can be added."""
    five = ScalingConfig(num_workers=5, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.6})
    said = r"5 workers of 1 CPU and 0.6 GPU each \(PACK\)SAID: the cluster has .*: room for 2 of them"
    with pytest.raises(InsufficientResourcesError, match=said.replace("SAID", " within 1 s")):
        plan_workers(five, timeout_s=1)
    with pytest.raises(InsufficientResourcesError, match="cannot place " + said.replace("SAID", "")):
        plan_workers(five, timeout_s=600, fixed=True)
    assert wait_until(nothing_is_left)


def test_places_that_others_hold(cluster):
    """The message lists required and free resources and advises to wait; nothing of the waiting plan is left."""
    assert wait_until(lambda: ray.available_resources().get("GPU") == 2), "what ran before has given its GPUs back"
    holder = ray.remote(num_gpus=2)(wait_until_killed).remote()
    assert wait_until(lambda: not ray.available_resources().get("GPU"))
    with pytest.raises(InsufficientResourcesError, match=r"1 GPU needed and 0 free.*Wait for other jobs"):
        plan_workers(HALVES, timeout_s=1)
    ray.cancel(holder, force=True)
    assert wait_until(nothing_is_left)


def wait_until_killed():
    """Hold the resources."""
    import time

    time.sleep(600)


@pytest.mark.parametrize(
    ("scaling", "backend", "said"),
    [
        ({"num_workers": 1}, "ucc", "left to Ray Train"),
        ({"num_workers": 2, "resources_per_worker": {"CPU": 0}}, "auto", "workers with resources"),
        ({"num_workers": 0}, "auto", "a fixed number of at least 1"),
    ],
)
def test_nothing_to_plan(scaling, backend, said):
    """The error comes before any call to Ray."""
    with pytest.raises(ValueError, match=said):
        plan_workers(ScalingConfig(**scaling), FracTorchConfig(backend=backend))


@pytest.mark.full(but="win32")
def test_command(cluster):
    """The command on a running cluster prints the plan as JSON."""
    address = ray.get_runtime_context().gcs_address
    done = plan("--num-workers", "1", "--address", address, "--json", "--num-gpus", "1")
    assert done.returncode == 0, done.stderr
    assert f"--num-gpus 1: no effect, because {address} is already running\n" in done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["backend"], len(found["workers"])) == (True, "gloo", 1)


@pytest.mark.full
def test_command_on_a_machine_without_a_gpu():
    """Its own Ray has too few places: the options that declare more are named; with them the plan is made."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: nothing is missing")
    wish = ("--num-workers", "4", "--gpus-per-worker", "0.5", "--address", "local")
    done = plan(*wish, "--num-cpus", "3")
    assert done.returncode == 1
    assert "declare more with --num-gpus and --num-cpus" in done.stderr
    done = plan(*wish, "--num-gpus", "2", "--num-cpus", "5", "--on-missing-cuda", "cpu")
    assert done.returncode == 0, done.stderr
    assert "this Ray has 2 logical GPUs and 5 logical CPUs (--num-gpus 2, --num-cpus 5)" in done.stderr
    assert "training on the CPU with gloo [4 workers" in done.stdout


@pytest.mark.full
def test_command_that_fails(cluster):
    """The error has its reason, and the exit code is 1."""
    address = ray.get_runtime_context().gcs_address
    done = plan("--num-workers", "2", "--gpus-per-worker", "3", "--timeout-s", "1", "--address", address, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["reason"] == "insufficient_resources"
