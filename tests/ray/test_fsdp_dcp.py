"""FSDP2 and torch's sharded checkpoints (DCP) with this package's process group, across a change of the world size."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import ray.train
import torch
from ray.train import Checkpoint
from torch import nn

from ray_fracbackend.ipc import host_memory_support
from tests.ray.training_runs import assert_close, fit, tell

pytestmark = pytest.mark.usefixtures("cluster")

STEPS = 3


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step):
    """Return twelve rows, so that two and three ranks have equal parts."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)


def train_steps(model, optimizer, steps, rank=0, world_size=1):
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rank::world_size]), targets[rank::world_size]).backward()
        optimizer.step()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_sharded(config):
    """Use FSDP2 with a DCP checkpoint, as in Ray's guide."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = optimizer_of(model)
    if config["checkpoint"]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        with config["checkpoint"].as_directory() as folder:
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train_steps(model, optimizer, config["steps"], dist.get_rank(), dist.get_world_size())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        ray.train.report({"steps": config["steps"][-1]}, checkpoint=Checkpoint.from_directory(folder))
    tell(
        config,
        {name: parameter.full_tensor() for name, parameter in model.named_parameters()},
        rows=model[0].weight.to_local().shape[0],
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_fully_shard_and_resize(tmp_path):
    """Two ranks shard, train and save; three load and train further; the result is that of one process with the whole batches."""
    second_backend = "gloo" if host_memory_support() else "ipc"
    single = make_model()
    optimizer = optimizer_of(single)
    checkpoint = None
    for run, (backend, num_workers) in enumerate([("gloo", 2), (second_backend, 3)]):
        steps = list(range(run * STEPS, (run + 1) * STEPS))
        (tmp_path / str(run)).mkdir()
        result, told = fit(train_sharded, tmp_path / str(run), backend, num_workers, steps=steps, checkpoint=checkpoint)
        train_steps(single, optimizer, steps)
        for rank in told:
            assert_close(rank["state"], dict(single.named_parameters()))
        assert sum(rank["rows"] for rank in told) == 16
        assert max(rank["rows"] for rank in told) < 16
        checkpoint = result.checkpoint
        with checkpoint.as_directory() as folder:
            assert len(list(Path(folder).glob("*.distcp"))) == num_workers
