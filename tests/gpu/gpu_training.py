"""What the GPU tests train, on Ray workers or in one process, and how a trainer of it is run. Runs on CPUs as well.

A job is a dictionary of plain values: ``name`` of a function below, and its arguments. What each rank found goes to
``rankN.json`` in the job's folder.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import ray.tune
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

from ray_fracbackend import FracTorchConfig, get_start_report

NUM_STEPS = 6
# Divisible by every number of ranks that is tested.
BATCH_SIZE = 48
_NUM_FEATURES = 32
_MEET_S = 60.0
_BLOCK_BYTES = 64 << 20


class Network(nn.Module):
    """A small network with a branch that no loss reaches, so that DDP needs find_unused_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(_NUM_FEATURES, 256), nn.ReLU(), nn.Linear(256, 10))
        self.unused = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a step's whole batch, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH_SIZE, _NUM_FEATURES, generator=generator)
    return inputs.to(device), inputs[:, :10].argmax(dim=1).to(device)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
) -> float:
    """One step on this rank's part of the batch; the mean loss of all ranks."""
    inputs, labels = (part[rank::num_ranks] for part in batch(step, device))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    if num_ranks > 1:
        dist.all_reduce(mean)
    return mean.item() / num_ranks


def run_steps(model: nn.Module, device: torch.device, rank: int, num_ranks: int, lr: float = 0.5) -> list[float]:
    """Train on this rank's part of each batch; the mean loss of all ranks by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return [train_step(model, optimizer, step, device, rank, num_ranks) for step in range(NUM_STEPS)]


def losses_of_one_process(device: str) -> list[float]:
    """The losses of the whole batch in one process, without Ray."""
    torch.manual_seed(0)
    return run_steps(Network().to(device), torch.device(device), 0, 1)


def leave(out: str, found: dict[str, Any]) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{dist.get_rank()}"
    draft.write_text(json.dumps(found))
    draft.replace(folder / f"rank{dist.get_rank()}.json")


def tell(config: dict[str, Any], found: dict[str, Any]) -> None:
    """`leave` what this rank found, and report to Ray."""
    leave(config["out"], found)
    ray.train.report({"loss": found.get("losses", [0.0])[-1]})


def _spread_of_parameters(model: nn.Module, device: torch.device) -> float:
    """Difference between the largest and the smallest checksum that a rank has of its parameters."""
    checksum = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()]).sum().to(device)
    low, high = checksum.clone(), checksum.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return (high - low).item()


def state_of(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """What a trained model is and runs on, and whether all ranks have the same parameters."""
    return {
        "spread": _spread_of_parameters(model, device),
        "backend": dist.get_backend(),
        "device": str(device),
        "model": type(model).__name__,
    }


def trained(config: dict[str, Any]) -> dict[str, Any]:
    """Train as a user would; losses, backend, device, visible devices and the start's report."""
    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    model = ray.train.torch.prepare_model(Network(), parallel_strategy_kwargs={"find_unused_parameters": True})
    if config.get("num_trials"):
        _meet_other_trials(Path(config["out"]), config["num_trials"])
    losses = run_steps(model, device, dist.get_rank(), dist.get_world_size(), config.get("lr", 0.5))
    found = {"losses": losses, **state_of(model, device), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    if not config["stock"]:
        found["report"] = get_start_report().to_dict()
    return found


def train_function(config: dict[str, Any]) -> None:
    tell(config, trained(config))


def _meet_other_trials(out: Path, num_trials: int) -> None:
    """Goes on when that many trials are training at one time."""
    folder = out.parent
    if dist.get_rank() == 0:
        (folder / f"here_{out.name}").touch()
        end = time.monotonic() + _MEET_S
        while len(list(folder.glob("here_*"))) < num_trials:
            if time.monotonic() > end:
                raise RuntimeError(f"fewer than {num_trials} trials train at one time")
            time.sleep(0.1)
    dist.barrier()


def _uses_memory(device: torch.device) -> bool:
    mine = torch.ones(_BLOCK_BYTES // 4, device=device)
    return bool((mine * 2 == 2).all())


def memory_function(config: dict[str, Any]) -> None:
    """Rank 0 takes CUDA memory until it is refused; the others then use theirs."""
    device = ray.train.torch.get_device()
    total = torch.cuda.get_device_properties(device).total_memory
    blocks: list[torch.Tensor] = []
    refused_at = None
    if dist.get_rank() == 0:
        try:
            while len(blocks) * _BLOCK_BYTES <= total:
                blocks.append(torch.ones(_BLOCK_BYTES, dtype=torch.uint8, device=device))
        except torch.cuda.OutOfMemoryError:
            refused_at = torch.cuda.memory_reserved(device) / total
            if not config["catch"]:
                raise
    dist.barrier()
    works = dist.get_rank() == 0 or _uses_memory(device)  # while rank 0 holds all that it may have
    dist.barrier()
    blocks.clear()
    works = works and _uses_memory(device)
    tell(config, {"refused_at": refused_at, "works": works})


def make_trainer(
    job: dict[str, Any], function: Any, out: str | None = None, run: str = "run", max_failures: int = 0, **more: Any
) -> TorchTrainer:
    """A trainer whose workers share the GPU, or have the job's ``scaling``; the function gets ``more`` as well.

    ``worker_env`` of a job are variables for the workers alone (V2), so that a fault is in one job of a Ray.
    """
    num_workers, stock, out = job.get("num_workers", 2), job.get("stock", False), out or job["out"]
    storage, variables = Path(f"{out}_storage"), job.get("worker_env")
    storage.mkdir(exist_ok=True, parents=True)
    scaling = job.get("scaling")
    if scaling is None:
        fraction = job["fraction"] if "fraction" in job else int(10_000 / num_workers) / 10_000
        scaling = {"num_workers": num_workers, "use_gpu": True, "resources_per_worker": {"CPU": 1, "GPU": fraction}}
    return TorchTrainer(
        function,
        train_loop_config={"out": out, "storage": str(storage), "stock": stock, "fault": job.get("fault"), **more},
        torch_config=TorchConfig() if stock else FracTorchConfig(**job.get("settings", {})),
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(
            name=run,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=max_failures),
            **({"worker_runtime_env": {"env_vars": variables}} if variables else {}),
        ),
    )


def answers_in(folder: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("rank*.json"))]


def train(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One run of `train_function`; what each rank told."""
    make_trainer(job, train_function).fit()
    return answers_in(job["out"])


def memory(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One run of `memory_function`; what each rank told."""
    make_trainer(job, memory_function, catch=job["catch"]).fit()
    return answers_in(job["out"])


def tune(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Two trials of `train_function` at one time, by the way of the engine; what each rank of each trial told."""
    rates = [0.5, 0.25]

    def loop_config(lr: float) -> dict[str, Any]:
        return {"out": f"{job['out']}/{lr}", "stock": False, "lr": lr, "num_trials": len(rates)}

    def trial(config: dict[str, Any]) -> None:
        out = f"{job['out']}/{config['lr']}"
        make_trainer(job, train_function, out, lr=config["lr"], num_trials=len(rates)).fit()

    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    run_config = getattr(ray.tune, "RunConfig", RunConfig)(name="tune", storage_path=f"{job['out']}_storage")
    if job["engine"] == "v2":
        tuner = ray.tune.Tuner(trial, param_space={"lr": ray.tune.grid_search(rates)}, run_config=run_config)
    else:
        space = {"train_loop_config": ray.tune.grid_search([loop_config(lr) for lr in rates])}
        tuner = ray.tune.Tuner(make_trainer(job, train_function), param_space=space, run_config=run_config)
    results = tuner.fit()
    if results.errors:
        raise results.errors[0]
    return answers_in(job["out"])


JOBS = {"train": train, "memory": memory, "tune": tune}
