"""Ray jobs for the tests on the emulated CUDA runtime: users' scripts in small, for any ScalingConfig. Run by tests/gpu/gpu_server.py."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import FracTorchConfig, check_devices, get_start_report
from tests.cuda import cuda_training
from tests.gpu.gpu_training import Network, answers_in, run_steps, state_of, tell


def look_and_train(config: dict[str, Any]) -> None:
    """Tell which devices this rank has by every way that Ray and torch know, train, and leave a checkpoint on every rank."""
    torch.manual_seed(0)
    device, devices = ray.train.torch.get_device(), ray.train.torch.get_devices()
    model = ray.train.torch.prepare_model(Network(), parallel_strategy_kwargs={"find_unused_parameters": True})
    losses = run_steps(model, device, dist.get_rank(), dist.get_world_size())
    found = {
        "losses": losses,
        **state_of(model, device),
        "devices": list(map(str, devices)),
        "current": torch.cuda.current_device() if device.type == "cuda" else None,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    if not config["stock"]:
        found["report"] = get_start_report().to_dict()
    if not config["stock"] and device.type == "cuda":
        check = check_devices()
        found["bound"] = dist.group.WORLD.bound_device_id is not None  # type: ignore[union-attr]
        # A group of torch's own: if the default group is bound to a device, NCCL splits its communicator.
        total, group = torch.ones(1, device=device), dist.new_group()
        dist.all_reduce(total, group=group)
        found["new_group"] = total.item()
        dist.barrier()
        found["check"] = [check.backend, [group.ranks for group in check.share_groups]]
    tell(config, found)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / f"rank{dist.get_rank()}.pt")
        ray.train.report({"loss": losses[-1]}, checkpoint=Checkpoint.from_directory(folder))


def shape(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One run of `look_and_train` with a ScalingConfig of any shape; what each rank told, and the checkpoint's files.

    ``worker_env`` are variables for the workers alone (V2), so that a fault is in one job of a Ray.
    """
    stock = job.get("stock", False)
    variables = job.get("worker_env")
    of_workers = {"worker_runtime_env": {"env_vars": variables}} if variables else {}
    trainer = TorchTrainer(
        look_and_train,
        train_loop_config={"out": job["out"], "stock": stock},
        torch_config=TorchConfig() if stock else FracTorchConfig(**job.get("settings", {})),
        scaling_config=ScalingConfig(**job["scaling"]),
        run_config=RunConfig(name="run", storage_path=f"{job['out']}_storage", **of_workers),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        files = sorted(path.name for path in Path(folder).iterdir() if path.suffix == ".pt")
    return [{**answer, "files": files} for answer in answers_in(job["out"])]


JOBS = {**cuda_training.JOBS, "shape": shape}
