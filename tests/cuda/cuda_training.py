"""Ray jobs on the emulated CUDA runtime that are interrupted: a rank fails, a node is lost, a run goes on from a checkpoint.

Run by tests/gpu/gpu_server.py.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from ray_fracbackend import FracTorchConfig, get_start_report, report_rank0
from ray_fracbackend._ray import v2_enabled
from tests.faults.driver import described
from tests.faults.planted import FAULT, strike, told_at
from tests.gpu.gpu_training import NUM_STEPS, Network, answers_in, train_step
from tests.processes import left_files, shared_files, train_worker_processes, wait_until

# After which step a checkpoint is saved, and before which rank 1 fails the first time.
_SAVED_AFTER, _FAILS_BEFORE = 2, 3
_WAIT_S = 120.0
# Elements of a collective that the device is busy with for a while.
_LATE = 1 << 22


def make_model(device: torch.device) -> nn.Module:
    """The same weights in every process; every parameter has a gradient."""
    torch.manual_seed(0)
    return Network().body.to(device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With a state, so that a checkpoint without it leads to other losses."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_alone(device: str, num_steps: int = NUM_STEPS) -> tuple[list[float], list[float]]:
    """Losses and weights of one process with the whole batches."""
    model = make_model(torch.device(device))
    optimizer = optimizer_of(model)
    losses = [train_step(model, optimizer, step, torch.device(device)) for step in range(num_steps)]
    return losses, weights_of(model)


def weights_of(model: nn.Module) -> list[float]:
    """All parameters as plain numbers, sharded ones as a whole."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def tell(config: dict[str, Any], **found: Any) -> None:
    """Leave what this rank found for the caller of the job."""
    folder = Path(config["out"])
    folder.mkdir(parents=True, exist_ok=True)
    told = {"backend": dist.get_backend(), "report": get_start_report().to_dict(), "pid": os.getpid(), **found}
    draft = folder / f".{dist.get_rank()}"
    draft.write_text(json.dumps(told))
    draft.replace(folder / f"rank{dist.get_rank()}.json")


def fails_now(config: dict[str, Any], first: int, step: int) -> None:
    """Rank 1 fails in the midst of the first attempt; ``late``: with collectives on the devices that it never ends."""
    fault = config.get("fault")
    if not fault or (first, step) != (0, _FAILS_BEFORE):
        return
    works = []
    if fault.endswith("late"):
        device = ray.train.torch.get_device()
        works = [dist.all_reduce(torch.ones(_LATE, device=device), async_op=True) for _ in range(4)]
    if dist.get_rank() == 1:
        if not v2_enabled():
            _wait_for_tune(config["storage"], step)
        strike(fault.partition(" ")[0], config["storage"])
    for work in works:
        work.wait()


def _wait_for_tune(storage: str, step: int) -> None:
    """V1 asks all ranks for their next report, or error, once it has one of each: of a rank that is stopped with one under way it
    waits for ever, and does not hear of the others' errors."""
    num_reports = step + 2  # two more for the controller

    def has_all() -> bool:
        return any(
            len(log.read_text().splitlines()) >= num_reports for log in Path(storage, "run").glob("*/result.json")
        )

    assert wait_until(has_all, 60)


def report(loss: float, checkpoint: Checkpoint | None = None) -> None:
    """Report from every rank; with a checkpoint, return when Ray's controller has it, however soon the run fails then."""
    ray.train.report({"loss": loss}, checkpoint=checkpoint)
    if checkpoint is not None:
        wait_for_controller(loss)


def wait_for_controller(loss: float) -> None:
    """It takes one report of each rank at a time, so the third can be left when the first has been dealt with."""
    for _ in range(2):
        ray.train.report({"loss": loss})


def resuming_function(config: dict[str, Any]) -> None:
    """DDP with a checkpoint from every rank: each goes on from its own file."""
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), ray.train.torch.get_device()
    model = ray.train.torch.prepare_model(make_model(device))
    optimizer, first = optimizer_of(model), 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / f"rank{rank}.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    losses = []
    for step in range(first, NUM_STEPS):
        fails_now(config, first, step)
        losses.append(train_step(model, optimizer, step, device, rank, num_ranks))
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if step + 1 == _SAVED_AFTER:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, Path(folder) / f"rank{rank}.pt")
                saved = Checkpoint.from_directory(folder)
            report(losses[-1], saved)
    tell(config, first=first, losses=losses, weights=weights_of(model), device=str(device))


def sharded_function(config: dict[str, Any]) -> None:
    """FSDP2 with torch's sharded checkpoints, as Ray's guide has it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), ray.train.torch.get_device()
    model = make_model(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer, first = optimizer_of(model), 0
    if (checkpoint := ray.train.get_checkpoint() or config["checkpoint"]) is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(0)}
        with checkpoint.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        first = int(state["step"])
    losses = []
    for step in range(first, config["until"]):
        fails_now(config, first, step)
        losses.append(train_step(model, optimizer, step, device, rank, num_ranks))
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if (step + 1) % _SAVED_AFTER == 0:
                model_state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step + 1)}
                dcp.save(state, checkpoint_id=folder)
                saved = Checkpoint.from_directory(folder)
            report(losses[-1], saved)
    rows = model[0].weight.to_local().shape[0]
    tell(config, first=first, losses=losses, weights=weights_of(model), device=str(device), rows=rows)


def make_trainer(
    job: dict[str, Any], function: Any, num_workers: int, max_failures: int = 0, **more: Any
) -> TorchTrainer:
    """A trainer whose workers share a device."""
    storage = Path(f"{job['out']}_storage")
    storage.mkdir(exist_ok=True)
    return TorchTrainer(
        function,
        train_loop_config={"out": job["out"], "storage": str(storage), "fault": job.get("fault"), **more},
        torch_config=FracTorchConfig(**job.get("settings", {})),
        scaling_config=ScalingConfig(
            num_workers=num_workers, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": job.get("fraction", 0.5)}
        ),
        run_config=RunConfig(
            name=more.get("run", "run"),
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )


def resume(job: dict[str, Any]) -> list[dict[str, Any]]:
    """A run whose rank 1 fails once, and that Ray starts again; what each rank of the second attempt told."""
    result = make_trainer(job, resuming_function, 2, max_failures=1).fit()
    return [{**answer, "metrics": result.metrics} for answer in answers_in(job["out"])]


def sharded(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Two ranks, restarted once, then three that go on from their checkpoint; what the ranks of both runs told."""
    job = {**job, "fraction": 0.33}
    result = make_trainer(job, sharded_function, 2, max_failures=1, until=4, checkpoint=None, run="two").fit()
    two = answers_in(job["out"])
    make_trainer(job, sharded_function, 3, until=NUM_STEPS, checkpoint=result.checkpoint, run="three").fit()
    return [*two, *answers_in(job["out"])]


def fault(job: dict[str, Any]) -> list[dict[str, Any]]:
    """A run whose rank 1 fails for good: the error of fit(), seconds from the fault to it, and what is left behind."""
    before, error = shared_files(), None
    try:
        make_trainer(job, resuming_function, job.get("num_workers", 2)).fit()
    except Exception as caught:
        error = described(caught)
    struck = told_at(f"{job['out']}_storage", FAULT)
    seconds = time.time() - struck if struck else None
    wait_until(lambda: not _left(before), 30)
    return [{"error": error, "seconds": seconds, "left": _left(before)}]


def _left(before: set[str]) -> list[str]:
    """What is still there of a run that is over."""
    groups = ray.util.placement_group_table().items()
    return [
        *(f"process {process.pid}" for process in train_worker_processes()),
        *(f"placement group {name}" for name, group in groups if group["state"] != "REMOVED"),
        *(f"/dev/shm/{name}" for name in left_files(before)),
    ]


def elastic_function(config: dict[str, Any]) -> None:
    """Train until a node is lost with three ranks, then to the end with two, from rank 0's checkpoint."""
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), ray.train.torch.get_device()
    model = ray.train.torch.prepare_model(make_model(device))
    optimizer, first = optimizer_of(model), 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "model.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    losses = []
    for step in range(first, NUM_STEPS):
        losses.append(train_step(model, optimizer, step, device, rank, num_ranks))
        if step + 1 == _SAVED_AFTER:
            with tempfile.TemporaryDirectory() as folder:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, Path(folder) / "model.pt")
                report_rank0({"loss": losses[-1]}, Checkpoint.from_directory(folder))
            wait_for_controller(losses[-1])
            if num_ranks == 3:
                tell({"out": f"{config['out']}/three"}, first=first, losses=losses, device=str(device))
                total = torch.ones(1 << 16, device=device)
                while True:  # until the node of rank 2 is lost
                    dist.all_reduce(total)
                    total.fill_(float(total[0].item() == 3))
    ray.train.report({"loss": losses[-1]})
    tell({"out": f"{config['out']}/two"}, first=first, losses=losses, weights=weights_of(model), device=str(device))


@ray.remote(num_cpus=0)
def _fit(trainer: TorchTrainer) -> None:
    trainer.fit()


def elastic(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Three ranks on two nodes with a device each, of which one is lost; what the ranks told before and after."""
    ray.shutdown()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 3, "num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": "0"}},
    )
    lost = cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"CUDA_VISIBLE_DEVICES": "1"})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address)
    three = Path(job["out"], "three")
    trainer = make_trainer(job, elastic_function, (2, 3), max_failures=5)  # type: ignore[arg-type]
    run = _fit.remote(trainer)
    if not wait_until(lambda: len(list(three.glob("rank*.json"))) == 3, _WAIT_S):
        raise TimeoutError("three ranks never trained")
    cluster.remove_node(lost, allow_graceful=False)
    ray.get(run, timeout=_WAIT_S)
    found = [*answers_in(str(three)), *answers_in(f"{job['out']}/two")]
    ray.shutdown()
    cluster.shutdown()
    return found


JOBS = {"resume": resume, "sharded": sharded, "fault": fault, "elastic": elastic}
