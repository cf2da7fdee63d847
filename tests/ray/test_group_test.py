"""ray-fracbackend test: a real run on a real local Ray, with the engine of RAY_TRAIN_V2_ENABLED; also how it ends."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray
import torch
from ray.train import ScalingConfig
from torch import nn

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.cli.commands.test import outcome
from ray_fracbackend.cli.ddp_steps import largest_difference, train
from ray_fracbackend.cli.plan import fit
from ray_fracbackend.ipc import host_memory_support
from tests.processes import wait_until, with_signals
from tests.ray.test_placement import nothing_is_left

COMMAND = [sys.executable, "-m", "ray_fracbackend", "test"]


@pytest.mark.parametrize(
    ("backend", "num_workers"),
    [
        ("auto", 2),
        pytest.param("auto", 3, marks=pytest.mark.full),
        pytest.param("cpu:gloo,cuda:staged", 2, marks=pytest.mark.full),
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
    report, *steps = fit(ScalingConfig(num_workers=num_workers), FracTorchConfig(backend=backend), train)
    assert report.verification.world_size == num_workers
    assert report.backend == ("gloo" if backend == "auto" else backend)
    found = outcome(report, sorted(steps))
    assert found.error is None
    assert all(step["last_loss"] < step["first_loss"] for step in found.values["steps"]), "it trains"
    assert f"10 DDP steps on {num_workers} workers" in found.text
    assert wait_until(nothing_is_left)
    # A difference from one process is a failure, whatever its cause and rank.
    for difference, told in (1e-3, 1e-3), (float("nan"), None):
        wrong = outcome(report, [*sorted(steps)[:-1], (*max(steps)[:-1], difference)])
        assert (wrong.error.reason, wrong.error.ranks) == ("wrong_weights", [num_workers - 1])
        assert wrong.values["steps"][-1]["difference"] == told
        assert f"problem: the weights of rank {num_workers - 1} differ from those of one process" in wrong.text


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
def test_command(cluster):
    """The command on a running cluster prints one JSON document with report and steps, with exit code 0."""
    arguments = ["--num-workers", "2", "--gpus-per-worker", "0.5", "--on-missing-cuda", "cpu", "--json"]
    arguments += ["--address", ray.get_runtime_context().gcs_address]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["report"]["settings"]["on_missing_cuda"], len(found["steps"])) == (True, "cpu", 2)
    assert max(step["difference"] for step in found["steps"]) < 1e-9


@pytest.mark.full
@pytest.mark.linux(reason="sends signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["raylet", "TrainWorker"], ids=["Ray starts", "the workers start"])
def test_a_signal(number, when):
    """One line, the shell's exit code, and no process of the local Ray is left."""
    process = subprocess.Popen(
        with_signals(*COMMAND, "--address", "local", "--num-cpus", "4"), stderr=subprocess.PIPE, text=True
    )
    own = psutil.Process(process.pid)

    def children():
        return [each for each in own.children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]

    assert wait_until(lambda: any(when in " ".join(each.cmdline()) for each in children()), 100)
    time.sleep(0.5)
    below = children()
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + number, errors
    # After a start of Ray that was interrupted its agents end by themselves, a minute later, as with ray.init() alone.
    assert not psutil.wait_procs(below, timeout=120 if when == "raylet" else 20)[1]
