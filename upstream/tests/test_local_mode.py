"""Behaviour: training in the driver's own process, stock and as if merged."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ray_fracbackend.worker.store import hold_store, release_store

from upstream.install import as_if_merged
from upstream.tests.conftest import ALWAYS_ON

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

pytestmark = pytest.mark.full


@pytest.fixture(params=["stock", "merged"])
def local_as(request):
    """No cluster: local mode has none."""
    with as_if_merged(*ALWAYS_ON) if request.param == "merged" else nullcontext():
        yield request.param
    ray.shutdown()


def train_func():
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum()
    loss.backward()
    ray.train.report({"backend": dist.get_backend() if dist.is_initialized() else None})


def test_one_process(local_as):
    """``num_workers=0`` runs the train function here, without a process group."""
    trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=0))
    assert trainer.fit().metrics == {"backend": None}


def test_under_torchrun(local_as, monkeypatch):
    """With torchrun's variables the process joins a group, and leaves it at the end."""
    variables = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": hold_store(None),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    try:
        trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=0))
        expected = "nccl" if torch.cuda.is_available() else "gloo"
        assert trainer.fit().metrics == {"backend": expected}
        assert not dist.is_initialized()
    finally:
        release_store()
