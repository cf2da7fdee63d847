"""ray-fracbackend test: a real group on a real local Ray, without Ray Train."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import ray
import torch
from ray.train import ScalingConfig
from torch import nn

from ray_fracbackend import FracTorchConfig, MissingDeviceError
from ray_fracbackend.cli.ddp_steps import GroupTest, largest_difference, run_group_test
from ray_fracbackend.ipc import host_memory_support
from tests.processes import wait_until
from tests.ray.conftest import HALF_GPU
from tests.ray.test_placement import nothing_is_left

COMMAND = [sys.executable, "-m", "ray_fracbackend", "test"]


@pytest.mark.parametrize(
    ("backend", "num_workers"),
    [
        ("auto", 2),
        pytest.param("auto", 3, marks=pytest.mark.full),
        pytest.param(
            "ipc",
            2,
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(host_memory_support() is not None, reason=f"no ipc: {host_memory_support()}"),
            ],
        ),
    ],
)
def test_the_group_trains_as_one_process(cluster, backend, num_workers):
    """Real placement, start, verification and DDP steps; the result is that of one process, and nothing is left."""
    result = run_group_test(ScalingConfig(num_workers=num_workers), FracTorchConfig(backend=backend))
    assert result.problem() is None
    assert len(result.steps) == num_workers
    assert result.report.verification.world_size == num_workers
    assert result.report.backend == ("gloo" if backend == "auto" else backend)
    (losses,) = {(step.first_loss, step.last_loss) for step in result.steps}
    assert losses[1] < losses[0], "it trains"
    assert f"10 DDP steps on {num_workers} workers" in result.to_text()
    assert wait_until(nothing_is_left)
    # A difference from one process is a failure, whatever its cause and rank.
    for difference, told in (1e-3, 1e-3), (float("nan"), None):
        wrong = GroupTest(result.report, (*result.steps[1:], replace(result.steps[0], difference=difference)))
        assert wrong.wrong_ranks == [num_workers - 1]
        assert wrong.to_dict()["steps"][-1]["difference"] == told
        assert f"problem: the weights of rank {num_workers - 1} differ from those of one process" in wrong.to_text()
        assert ("--backend gloo" in wrong.to_text()) == (backend == "ipc"), "no advice to use what is used"


@pytest.mark.parametrize("number", range(4))
def test_nan_in_one_weight_is_a_difference(number):
    """In any parameter."""
    one, other = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)) for _ in range(2))
    other.load_state_dict(one.state_dict())
    assert largest_difference(one, other) == 0
    with torch.no_grad():
        list(other.parameters())[number].view(-1)[-1] = float("nan")
    assert math.isnan(largest_difference(one, other))


@pytest.mark.full
def test_a_start_that_fails(cluster):
    """The start's own error is reported, and nothing is left."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: nothing is missing")
    with pytest.raises(MissingDeviceError, match="on_missing_cuda='cpu'"):
        run_group_test(ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=HALF_GPU), FracTorchConfig())
    assert wait_until(nothing_is_left)


@pytest.mark.full
def test_command(cluster):
    """The command on a running cluster prints one JSON document with report and steps, with exit code 0."""
    arguments = ["--num-workers", "2", "--gpus-per-worker", "0.5", "--on-missing-cuda", "cpu", "--json"]
    arguments += ["--address", ray.get_runtime_context().gcs_address]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["report"]["settings"]["on_missing_cuda"], len(found["steps"])) == (True, "cpu", 2)
    assert max(step["difference"] for step in found["steps"]) < 1e-9
    assert "ray_fracbackend: starting gloo at 127.0.0.1:" in done.stderr, "the lines of a start, as in a training run"
