"""PyTorch Lightning with Ray's strategies and this package's process group has the weights of one process.

The functions import Lightning, because that takes seconds in every process that collects the tests.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.ray.training_runs import BACKENDS, assert_close, assert_equal_on_ranks, fit, train_example

pytestmark = pytest.mark.usefixtures("cluster")

EPOCHS, BATCH_SIZE, NUM_WORKERS = 2, 32, 2
CONFIG = {"example": "lightning_mnist_like", "epochs": EPOCHS, "batch_size": BATCH_SIZE}


@pytest.fixture(scope="module")
def single():
    """Return the weights after the same epochs in one process, with the batches of all ranks as one, without Lightning's loop."""
    import lightning

    from examples import lightning_mnist_like as example

    lightning.seed_everything(0)
    data, model = example.images_like_mnist(), example.Classifier()
    # The ranks of a DistributedSampler take turns in the order of a single rank.
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)
    optimizer = model.configure_optimizers()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=BATCH_SIZE * NUM_WORKERS, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model.layers(images), labels).backward()
            optimizer.step()
    return model.state_dict()


def train_by_both_strategies(config):
    """Run the example; before it check how far the strategy for FSDP works on a CPU."""
    from ray.train.lightning import RayDDPStrategy, RayFSDPStrategy

    from examples import lightning_mnist_like as example

    example.RayDDPStrategy = RayFSDPStrategy
    with pytest.raises(RuntimeError, match="FSDP needs a non-CPU accelerator device"):
        example.train_func(config)
    example.RayDDPStrategy = RayDDPStrategy
    train_example(config)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_lightning(backend, tmp_path, single):
    """With RayDDPStrategy ranks, checkpoint and a single process agree; RayFSDPStrategy reaches torch, which needs a GPU."""
    result, told = fit(train_by_both_strategies, tmp_path, backend, **CONFIG)
    assert_equal_on_ranks(told)
    assert_close({name.removeprefix("module."): value for name, value in told[0]["state"].items()}, single)
    with result.checkpoint.as_directory() as folder:
        assert_close(torch.load(f"{folder}/checkpoint.ckpt", weights_only=False)["state_dict"], single)
    assert (result.metrics["epoch"], result.metrics["step"]) == (EPOCHS - 1, 512 // BATCH_SIZE // NUM_WORKERS * EPOCHS)
