"""After a failed start of V2 the resources are free and Ray's record names the error, whatever other callbacks do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_fracbackend._ray import v2_enabled
from tests.processes import python_path

pytestmark = pytest.mark.skipif(not v2_enabled(), reason="needs the V2 engine of Ray Train")

HOOKS = ("before_worker_group_abort", "after_worker_group_abort", "before_worker_group_shutdown")
# A process of its own: Ray reads whether it tracks the state of runs when it starts.
_SCRIPT = """
import sys, time
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.state.state_actor import get_state_actor
from ray_fracbackend import FracTorchConfig

storage, hooks = sys.argv[1], sys.argv[2:]


def failing(hook):
    def fails(self, *args):
        raise AttributeError(f"{hook}: no run")
    return type(hook, (WorkerGroupCallback,), {hook: fails})()


ray.init("local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
for hook in hooks:
    try:
        TorchTrainer(
            lambda: None,
            torch_config=FracTorchConfig(),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5}),
            run_config=RunConfig(name=hook, storage_path=storage, callbacks=[failing(hook), failing(hook)]),
        ).fit()
    except Exception as error:
        print(hook, "MissingDeviceError" in repr(error) or "cannot use" in str(error))
    end = time.monotonic() + 15
    while ray.available_resources().get("GPU") != 1 and time.monotonic() < end:
        time.sleep(0.2)
    groups = {group["state"] for group in ray.util.placement_group_table().values()}
    print(hook, ray.available_resources().get("GPU"), groups)
for attempts in ray.get(get_state_actor().get_train_run_attempts.remote()).values():
    for attempt in attempts.values():
        print(attempt.status.name, "torch cannot use" in attempt.status_detail)
"""


@pytest.mark.full
def test_callbacks_that_raise(tmp_path: Path) -> None:
    """Their own starts have not run. The GPU is free within 15 s, and each attempt is recorded as failed with the error."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "RAY_TRAIN_ENABLE_STATE_TRACKING": "1"}
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path), *HOOKS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    lines = [line for hook in HOOKS for line in (f"{hook} True", f"{hook} 1.0 {{'REMOVED'}}")]
    assert done.stdout.splitlines() == [*lines, *["ERRORED True"] * len(HOOKS)], done.stderr[-3000:]
