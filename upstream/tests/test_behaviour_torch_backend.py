"""Behaviour: how a process group starts and ends."""

import os

import pytest
import torch
import torch.distributed as dist

import ray
from ray.train import ScalingConfig
from ray.train.constants import TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError


def fit(train_func, torch_config, tmp_path):
    return TorchTrainer(
        train_func,
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    ).fit()


def describe_group():
    """Return properties of the process group in the train function."""
    context = ray.train.get_context()
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    assert int(os.environ["RANK"]) == dist.get_rank() == context.get_world_rank()
    assert int(os.environ["LOCAL_RANK"]) == context.get_local_rank()
    return {
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "timeout_s": timeout.total_seconds(),
        "master_addr": "MASTER_ADDR" in os.environ,
        "device": str(ray.train.torch.get_device()),
    }


@pytest.mark.parametrize("init_method", ["env", "tcp"])
def test_start(shared_ray, tmp_path, init_method):
    """The group has the configured backend, size, timeout and rendezvous."""
    config = TorchConfig(init_method=init_method, timeout_s=55)
    assert fit(describe_group, config, tmp_path).return_value == {
        "backend": "gloo",
        "world_size": 2,
        "timeout_s": 55,
        "master_addr": init_method == "env",
        "device": "cpu",
    }


def test_wrong_init_method(shared_ray, tmp_path):
    """An unknown init_method ends the run with an error that states the rule."""
    with pytest.raises(TrainingFailedError, match="Must be either 'env' or 'tcp'"):
        fit(describe_group, TorchConfig(init_method="file"), tmp_path)


def test_short_shutdown(shared_ray, tmp_path, monkeypatch):
    """A process group that has no time to shut down does not change the result."""
    monkeypatch.setenv(TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, "0")
    result = fit(describe_group, TorchConfig(backend="gloo"), tmp_path)
    assert result.error is None
