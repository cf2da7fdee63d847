"""ray-fracbackend plan: real probe workers on a real local Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import ray
import torch
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group_table

from ray_fracbackend import FracTorchConfig, InsufficientResourcesError, MissingDeviceError
from ray_fracbackend.cli.plan import plan_workers
from ray_fracbackend.cli.workers.actors import probe_workers, rank_order
from tests.processes import actor_processes, wait_until
from tests.ray.conftest import HALF_GPU

COMMAND = [sys.executable, "-m", "ray_fracbackend", "plan"]
HALVES = ScalingConfig(num_workers=3, use_gpu=True, resources_per_worker=HALF_GPU)


def plan(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=250, check=False)


def nothing_is_left():
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return not groups and not actor_processes("_ProbeWorker")


def test_plan(cluster):
    """Three workers with half a GPU: real placement, decision and text; nothing is left."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the gpu suite plans on it")
    report = plan_workers(HALVES, FracTorchConfig(on_missing_cuda="cpu"))
    assert report.backend == "gloo"
    assert report.verification is None
    assert [worker.rank for worker in report.workers] == [0, 1, 2]
    assert [worker.gpu_fraction for worker in report.workers] == [0.5] * 3
    # Ray packs two workers on its first GPU and the third on its second, and Train ranks them in that order.
    assert [worker.gpu_ids for worker in report.workers] == [("0",), ("0",), ("1",)]
    assert len({worker.pid for worker in report.workers}) == 3
    assert "not verified" in report.to_text()
    assert report.to_text().count("0.5 GPU, cpu\n") == 3
    assert wait_until(nothing_is_left)


@pytest.mark.full
def test_visible_devices(cluster):
    """Each worker sees the devices of all workers of its node, as in Ray Train, so indices have the same meaning."""
    with probe_workers(HALVES, FracTorchConfig(), timeout_s=30, fixed=False) as group:
        assert ray.get(group.execute_async(os.getenv, "CUDA_VISIBLE_DEVICES")) == ["0,1"] * 3
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
    """The error states which packing is possible and what to request; it comes at once if no node can be added."""
    five = ScalingConfig(num_workers=5, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.6})
    said = r"5 workers of 1 CPU and 0.6 GPU each \(PACK\)SAID: one node has room for 2 of them: 1 of 0.6 GPU fits on one GPU. "
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
    with pytest.raises(
        InsufficientResourcesError, match=r"other jobs hold .*1\.5 GPU needed and 0 free.*Wait for them"
    ):
        plan_workers(HALVES, timeout_s=1)
    ray.cancel(holder, force=True)
    assert wait_until(nothing_is_left)


def wait_until_killed():
    """Hold the resources."""
    import time

    time.sleep(600)


@pytest.mark.parametrize("config", [FracTorchConfig(backend="ucc"), FracTorchConfig(backend="tpu_dist")])
def test_nothing_to_plan(cluster, config):
    """A start that is left to Ray is not planned here."""
    with pytest.raises(ValueError, match="left to Ray Train"):
        plan_workers(ScalingConfig(num_workers=1), config)


def test_workers_without_resources():
    """Ray has nothing to place; the error comes before any call to Ray."""
    with pytest.raises(ValueError, match="workers with resources"):
        plan_workers(ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0}))


def test_no_workers(cluster):
    """Without a fixed number of workers there is nothing to place."""
    with pytest.raises(ValueError, match="a fixed number of at least 1"):
        plan_workers(ScalingConfig(num_workers=0))


@pytest.mark.full(but="win32")
def test_command(cluster):
    """The command on a running cluster prints the plan as JSON."""
    address = ray.get_runtime_context().gcs_address
    done = plan("--num-workers", "1", "--address", address, "--json", "--num-gpus", "1", "--no-verify")
    assert done.returncode == 0, done.stderr
    assert "plan: --no-verify: no effect, because a plan starts no process group\n" in done.stderr
    assert f"--num-gpus 1: no effect, because {address} is already running\n" in done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["backend"], len(found["workers"])) == (True, "gloo", 1)


@pytest.mark.full
def test_command_on_a_machine_without_a_gpu(tmp_path):
    """Its own Ray has too few places: the options that declare more are named; with them, the option to train on the CPU is."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: nothing is missing")
    wish = ("--num-workers", "4", "--gpus-per-worker", "0.5", "--address", "local")
    done = plan(*wish, "--num-cpus", "3")
    assert done.returncode == 1
    assert "Declare logical GPUs with --num-gpus 2 --num-cpus 4, with --on-missing-cuda cpu if" in done.stderr
    done = plan(*wish, "--num-gpus", "2", "--num-cpus", "4")
    assert done.returncode == 1
    assert "on_missing_cuda='cpu'" in done.stderr
    done = plan(*wish, "--num-gpus", "2", "--num-cpus", "4", "--on-missing-cuda", "cpu")
    assert done.returncode == 0, done.stderr
    assert "this Ray has 2 logical GPUs and 4 logical CPUs (--num-gpus 2, --num-cpus 4)" in done.stderr
    assert "training on the CPU with gloo [4 workers" in done.stdout


@pytest.mark.full
def test_command_that_fails(cluster):
    """The error has its reason, and the exit code is 1."""
    address = ray.get_runtime_context().gcs_address
    done = plan("--num-workers", "2", "--gpus-per-worker", "3", "--timeout-s", "1", "--address", address, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["reason"] == "insufficient_resources"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--num-workers"),
        (["--num-workers", "0"], "must be a whole number from 1"),
        (["--num-workers", "1", "--gpus-per-worker", "-1"], "must be a number from 0"),
        (["--num-workers", "1", "--backend", "gloo,"], "FracTorchConfig(backend='gloo,')"),
    ],
)
def test_wrong_usage(arguments, said):
    """Wrong usage exits with code 2 and an explanation."""
    done = plan(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_rank_order():
    """By node in order of appearance, within a node by lowest numeric GPU id; workers without GPUs keep their order."""
    assert rank_order(["b", "a", "b", "a"], [["1"], ["10"], ["0"], ["9"]]) == [2, 0, 3, 1]
    assert rank_order(["a", "b", "a"], [[], [], []]) == [0, 2, 1]
