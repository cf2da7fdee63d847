"""Fits with training libraries: each rank's process group and final weights."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ray.train import Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_fracbackend import FracTorchConfig, get_start_report
from ray_fracbackend.ipc import host_memory_support
from tests.ray.conftest import HALF_GPU

NO_IPC = pytest.mark.skipif(host_memory_support() is not None, reason=f"no ipc here: {host_memory_support()}")
BACKENDS = ["gloo", pytest.param("ipc", marks=NO_IPC)]


def tell(config: dict[str, Any], state: dict[str, torch.Tensor], **more: Any) -> None:
    """Write this rank's group and weights into ``config["out"]``; runs in the train function."""
    import torch.distributed as dist

    told = {
        "backends": (dist.get_backend(), get_start_report().backend),
        "state": {name: tensor.detach().clone() for name, tensor in state.items()},
        **more,
    }
    torch.save(told, os.path.join(config["out"], f"rank{dist.get_rank()}.pt"))


def train_example(config: dict[str, Any]) -> None:
    """Run the train function of an example, and save the model of the trainer that it prepares for Ray."""
    example = importlib.import_module(f"examples.{config['example']}")
    trainers, prepare = [], example.prepare_trainer
    example.prepare_trainer = lambda trainer: trainers.append(trainer) or prepare(trainer)
    example.train_func(config)
    tell(config, trainers[0].model.state_dict())


def fit(
    train: Callable[[dict[str, Any]], None], tmp_path: Any, backend: str, num_workers: int = 2, **config: Any
) -> tuple[Result, list[dict[str, Any]]]:
    """Train on logical half GPUs.

    Returns:
        Ray's result and each rank's, after checking that all trained with the requested backend.
    """
    result = TorchTrainer(
        train,
        train_loop_config={"out": str(tmp_path), **config},
        torch_config=FracTorchConfig(backend=backend, on_missing_cuda="cpu"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=True, resources_per_worker=HALF_GPU),
        run_config=RunConfig(name=backend, storage_path=str(tmp_path)),
    ).fit()
    told = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(num_workers)]
    assert [rank["backends"] for rank in told] == [(backend, backend)] * num_workers
    return result, told


def assert_equal_on_ranks(told: list[dict[str, Any]]) -> None:
    """Check that every rank has exactly the weights of rank 0."""
    for other in told[1:]:
        assert other["state"].keys() == told[0]["state"].keys()
        for name, tensor in told[0]["state"].items():
            assert torch.equal(other["state"][name], tensor), name


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that the weights equal those of the other run except for the order of float32 additions."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
