"""Piece 1. A torch without NCCL is that of every Windows machine, and this one's."""

import pytest
import torch
import torch.distributed as dist

from upstream.install import as_if_merged
from upstream.tests.conftest import ALWAYS_ON

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError

pytestmark = pytest.mark.skipif(
    dist.is_nccl_available(), reason="needs a torch without NCCL"
)


def train_func():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return {"backend": dist.get_backend(), "sum": tensor.item()}


def fit(tmp_path, **settings):
    """The user's script of ray-project/ray#49778: it asks for GPUs, and no backend."""
    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 1}
        ),
        run_config=RunConfig(storage_path=str(tmp_path)),
        **settings,
    )
    return trainer.fit().return_value


@pytest.fixture(scope="module")
def ray_with(request):
    """A local Ray with two GPUs that are numbers only, and some pieces."""
    with as_if_merged(*request.param) as runtime_env:
        ray.init(
            "local",
            num_cpus=4,
            num_gpus=2,
            include_dashboard=False,
            runtime_env=runtime_env if request.param else None,
        )
        yield
        ray.shutdown()


stock = pytest.mark.parametrize("ray_with", [()], indirect=True, ids=["stock"])
merged = pytest.mark.parametrize(
    "ray_with",
    [ALWAYS_ON, ("gloo_default",)],
    indirect=True,
    ids=["all merged", "merged"],
)


@pytest.mark.full
@stock
def test_stock_fails(ray_with, tmp_path):
    """Ray chooses NCCL, and torch has none."""
    with pytest.raises(TrainingFailedError, match="doesn't have NCCL built in"):
        fit(tmp_path)


@pytest.mark.full
@merged
def test_default_is_gloo(ray_with, tmp_path):
    """Ray chooses gloo, and leaves the user's config as it is."""
    torch_config = TorchConfig()
    assert fit(tmp_path, torch_config=torch_config) == {"backend": "gloo", "sum": 2.0}
    assert torch_config.backend is None


@pytest.mark.full
@merged
def test_explicit_nccl_still_fails(ray_with, tmp_path):
    """What the user asks for by name is not replaced."""
    with pytest.raises(TrainingFailedError, match="doesn't have NCCL built in"):
        fit(tmp_path, torch_config=TorchConfig(backend="nccl"))
