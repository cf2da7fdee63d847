"""Hugging Face Accelerate and transformers.Trainer with this package's process group have the weights of one process.

The functions import Transformers, because that takes seconds in every process that collects the tests.
"""

from __future__ import annotations

import os

import pytest
import ray.train
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.ray.training_runs import BACKENDS, assert_close, assert_equal_on_ranks, fit, tell, train_example

pytestmark = pytest.mark.usefixtures("cluster")

NUM_WORKERS, BATCH_SIZE = 2, 8


def small_job():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    data = TensorDataset(torch.randn(96, 8), torch.randint(3, (96,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data


def train_accelerate(config):
    from accelerate import Accelerator

    assert os.environ["HF_HUB_OFFLINE"] == "1"
    accelerator = Accelerator()
    model, optimizer, data = small_job()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH_SIZE))
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
    accelerator.wait_for_everyone()
    tell(
        config,
        accelerator.unwrap_model(model).state_dict(),
        gradient=model.module[0].weight.grad,
        place=(accelerator.num_processes, accelerator.process_index, str(accelerator.device)),
        gathered=accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
    )
    ray.train.report({"trained": 1})  # V1's Tune treats "done" as a trial's end


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_accelerate(backend, tmp_path):
    """A plain Accelerator() is distributed on the CPU with our group; its ranks and a single process agree."""
    _, told = fit(train_accelerate, tmp_path, backend)
    assert [rank["place"] for rank in told] == [(NUM_WORKERS, rank, "cpu") for rank in range(NUM_WORKERS)]
    assert [rank["gathered"] for rank in told] == [[0, 1]] * NUM_WORKERS
    assert torch.equal(told[0]["gradient"], told[1]["gradient"])
    assert_equal_on_ranks(told)
    model, optimizer, data = small_job()
    for inputs, labels in DataLoader(data, batch_size=BATCH_SIZE * NUM_WORKERS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert_close(told[0]["state"], model.state_dict())


CONFIG = {"epochs": 2, "learning_rate": 0.1, "optimizer": "sgd"}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the weights of the example's trainer in one process, with the batches of all ranks as one."""
    from examples import transformers_trainer as example

    trainer = example.make_trainer(
        {"batch_size": BATCH_SIZE * NUM_WORKERS, **CONFIG}, str(tmp_path_factory.mktemp("single"))
    )
    trainer.train()
    return trainer.model.state_dict()


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers(backend, tmp_path, single):
    """The example trains with our group; ranks, the reported checkpoint and a single process agree."""
    from safetensors.torch import load_file

    result, told = fit(
        train_example, tmp_path, backend, example="transformers_trainer", batch_size=BATCH_SIZE, **CONFIG
    )
    assert_equal_on_ranks(told)
    assert_close(told[0]["state"], single)
    with result.checkpoint.as_directory() as folder:
        assert_close(load_file(f"{folder}/checkpoint/model.safetensors"), single)
    assert result.metrics["epoch"] == CONFIG["epochs"]
