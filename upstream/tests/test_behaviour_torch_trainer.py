"""Behaviour: training, its errors and Ray's collectives."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ray
import ray.train.collective
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError


def fit(train_func, num_workers, tmp_path, **config):
    return TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
    ).fit()


def train_line(config):
    """Fit y = 2x + 5 with the utilities of Ray Train."""
    torch.manual_seed(0)
    x = torch.arange(32.0).unsqueeze(1) / 32
    loader = DataLoader(TensorDataset(x, 2 * x + 5), batch_size=4)
    loader = ray.train.torch.prepare_data_loader(loader)
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    if dist.get_world_size() > 1:
        assert isinstance(model, DistributedDataParallel)
        assert isinstance(loader.sampler, DistributedSampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    losses = []
    for _ in range(config["num_epochs"]):
        total = 0.0
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        gathered = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, weights)
        assert all(torch.equal(other, weights) for other in gathered)
        losses.append(total)
        ray.train.report({"loss": total})
    return losses


@pytest.mark.parametrize("num_workers", [1, 2])
def test_training(shared_ray, tmp_path, num_workers):
    """The loss decreases, and all DDP ranks have equal weights."""
    result = fit(train_line, num_workers, tmp_path, lr=0.1, num_epochs=3)
    assert result.error is None
    assert len(result.return_value) == 3
    assert result.return_value == sorted(result.return_value, reverse=True)


def fail_on_rank_one():
    if ray.train.get_context().get_world_rank() == 1:
        raise ValueError("the data is bad")
    ray.train.collective.barrier()


def test_worker_error(shared_ray, tmp_path):
    """An error in a train function ends the run and names its rank."""
    with pytest.raises(WorkerGroupError, match="the data is bad") as raised:
        fit(lambda config: fail_on_rank_one(), 2, tmp_path)
    assert list(raised.value.worker_failures) == [1]


def use_collectives(config):
    rank = ray.train.get_context().get_world_rank()
    value = ray.train.collective.broadcast_from_rank_zero({"from": rank})
    ray.train.collective.barrier()
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return {"from": value["from"], "sum": tensor.item()}


def test_collectives(shared_ray, tmp_path):
    """Ray Train's own collectives and torch's work in the same run."""
    assert fit(use_collectives, 3, tmp_path).return_value == {"from": 0, "sum": 6.0}
