"""Worker groups whose start fails: released resources and restarts."""

import os
import time

import pytest

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2.api.exceptions import TrainingFailedError


def wait_until_released(timeout_s=20):
    """Wait until no placement group and no CPU is in use; return False on a timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        states = {pg["state"] for pg in ray.util.placement_group_table().values()}
        num_cpus = ray.available_resources().get("CPU")
        if states <= {"REMOVED"} and num_cpus == ray.cluster_resources()["CPU"]:
            return True
        time.sleep(0.2)
    return False


class FailingBackend(_TorchBackend):
    def on_start(self, worker_group, backend_config):
        raise RuntimeError("the backend does not start")


class FailingConfig(TorchConfig):
    @property
    def backend_cls(self):
        return FailingBackend


def test_failed_backend_releases_the_worker_group(ray_start_4_cpus, tmp_path):
    """After a failed start fit() leaves no workers and no placement group."""
    trainer = TorchTrainer(
        lambda: None,
        torch_config=FailingConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(TrainingFailedError, match="the backend does not start"):
        trainer.fit()
    assert wait_until_released()


class Tracker(WorkerGroupCallback):
    """Opens its run when the group has started, and closes it on abort."""

    def after_worker_group_start(self, worker_group):
        self.run = object()

    def before_worker_group_abort(self, worker_group_context):
        del self.run


def test_callback_that_raises_on_abort(ray_start_4_cpus, tmp_path):
    """A callback whose own start has not run keeps no resources, and does not hide the error."""
    trainer = TorchTrainer(
        lambda: None,
        torch_config=FailingConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), callbacks=[Tracker()]),
    )
    with pytest.raises(TrainingFailedError, match="the backend does not start"):
        trainer.fit()
    assert wait_until_released()


class NotLoadable:
    """A train function that can be pickled but not unpickled."""

    def __reduce__(self):
        return int, ("not a number",)

    def __call__(self):
        pass


def test_failed_launch_releases_the_worker_group(ray_start_4_cpus, tmp_path):
    """The same is true if the train function cannot be launched."""
    trainer = TorchTrainer(
        NotLoadable(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(TrainingFailedError, match="invalid literal for int"):
        trainer.fit()
    assert wait_until_released()


class DyingWorker(WorkerGroupCallback):
    """End the process of rank 1 between the start of the group and the launch."""

    def __init__(self, marker):
        self._marker = marker

    def after_worker_group_start(self, worker_group):
        if not os.path.exists(self._marker):
            open(self._marker, "w").close()
            ray.wait([worker_group.execute_single_async(1, os._exit, 1)])


def test_worker_that_dies_at_launch(ray_start_4_cpus, tmp_path):
    """A worker that is dead when the train function is launched leads to a restart."""
    trainer = TorchTrainer(
        lambda: "trained",
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(tmp_path),
            callbacks=[DyingWorker(str(tmp_path / "died"))],
        ),
    )
    assert trainer.fit().return_value == "trained"
    assert (tmp_path / "died").exists()
    assert wait_until_released()
