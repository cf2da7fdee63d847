"""Ray jobs whose workers have a fault of the emulated CUDA runtime, each job another one. Run by tests/gpu/gpu_server.py."""

from __future__ import annotations

import os
from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_fracbackend import FracTorchConfig, get_start_report
from tests.gpu.gpu_training import answers_in, tell

_NUM_STEPS = 6


def add_up(config: dict[str, Any]) -> None:
    """Collectives on the worker's device, without DDP and item(), which pin memory. One rank may lose its GPU in the middle."""
    device = ray.train.torch.get_device()
    x = torch.ones(100_000, device=device)
    for step in range(_NUM_STEPS):
        if config["lose_at"] == step and dist.get_rank() == 1:
            os.environ["CUDA_RIG_FAULT"] = "device_lost=1"
        x = x + dist.get_rank()
        dist.all_reduce(x)
        x /= dist.get_world_size()
    tell(config, {"last": x.cpu()[-1].item(), "device": str(device), "report": get_start_report().to_dict()})


def failing(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One run of `add_up` on two workers at half a GPU each; what each rank told.

    Args:
        job: ``fault`` and ``state`` for the workers' environment, ``settings`` of FracTorchConfig, ``lose_at``, a step.
    """
    env = {"CUDA_RIG_FAULT": job["fault"], "CUDA_RIG_STATE": job["state"]}
    TorchTrainer(
        add_up,
        train_loop_config={"out": job["out"], "lose_at": job["lose_at"]},
        torch_config=FracTorchConfig(**{"start_timeout_s": 60, "timeout_s": 30, **job["settings"]}),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}),
        run_config=RunConfig(name="run", storage_path=f"{job['out']}_storage", worker_runtime_env={"env_vars": env}),
    ).fit()
    return answers_in(job["out"])


JOBS = {"failing": failing}
