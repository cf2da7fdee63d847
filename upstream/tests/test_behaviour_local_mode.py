"""Behaviour: training in the driver's own process."""

import pytest
import torch
import torch.distributed as dist

import ray
from ray._common.network_utils import find_free_port
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


@pytest.fixture
def no_cluster():
    """Local mode uses no cluster."""
    yield
    ray.shutdown()


def train_func():
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum()
    loss.backward()
    ray.train.report({"backend": dist.get_backend() if dist.is_initialized() else None})


def test_one_process(no_cluster):
    """``num_workers=0`` runs the train function here, without a process group."""
    trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=0))
    assert trainer.fit().metrics == {"backend": None}


def test_under_torchrun(no_cluster, monkeypatch):
    """With torchrun's variables the process joins a group and leaves it at the end."""
    variables = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": find_free_port(),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=0))
    expected = "nccl" if torch.cuda.is_available() else "gloo"
    assert trainer.fit().metrics == {"backend": expected}
    assert not dist.is_initialized()
