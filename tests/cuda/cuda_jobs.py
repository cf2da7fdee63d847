"""Ray jobs for the tests on the emulated CUDA runtime: any ScalingConfig, faults of the workers, and runs that are interrupted.

Run by tests/gpu/gpu_server.py.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer
from torch import nn

from ray_fracbackend import check_devices, get_start_report, report_rank0
from ray_fracbackend._ray import v2_enabled
from tests.faults.planted import strike
from tests.gpu.gpu_training import NUM_STEPS, Network, answers_in, leave, make_trainer, tell, train_step, trained
from tests.processes import wait_until

# After which step a checkpoint is saved, and before which rank 1 fails the first time.
_SAVED_AFTER, _FAILS_BEFORE = 2, 3
_WAIT_S = 120.0
# Elements of a collective that the device is busy with for a while.
_LATE = 1 << 22


def look_and_train(config: dict[str, Any]) -> None:
    """Train, tell which devices this rank has by every way that Ray and torch know, and leave a checkpoint on every rank."""
    device, found = ray.train.torch.get_device(), trained(config)
    found["devices"] = list(map(str, ray.train.torch.get_devices()))
    found["current"] = torch.cuda.current_device() if device.type == "cuda" else None
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
        Path(folder, f"rank{dist.get_rank()}.pt").write_text("a checkpoint")
        ray.train.report({"loss": found["losses"][-1]}, checkpoint=Checkpoint.from_directory(folder))


def shape(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One run of `look_and_train`; what each rank told, and the checkpoint's files."""
    result = make_trainer(job, look_and_train).fit()
    with result.checkpoint.as_directory() as folder:
        files = sorted(path.name for path in Path(folder).iterdir() if path.suffix == ".pt")
    return [{**answer, "files": files} for answer in answers_in(job["out"])]


def add_up(config: dict[str, Any]) -> None:
    """Collectives on the worker's device, without DDP and item(), which pin memory. One rank may lose its GPU in the middle."""
    device = ray.train.torch.get_device()
    x = torch.ones(100_000, device=device)
    for step in range(6):
        if config["lose_at"] == step and dist.get_rank() == 1:
            os.environ["CUDA_RIG_FAULT"] = "device_lost=1"
        x = x + dist.get_rank()
        dist.all_reduce(x)
        x /= dist.get_world_size()
    tell(config, {"last": x.cpu()[-1].item(), "device": str(device), "report": get_start_report().to_dict()})


def failing(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One run of `add_up`, in which a GPU is lost at the step ``lose_at``; what each rank told."""
    make_trainer(job, add_up, lose_at=job["lose_at"]).fit()
    return answers_in(job["out"])


def make_model(device: torch.device) -> nn.Module:
    """The same weights in every process; every parameter has a gradient."""
    torch.manual_seed(0)
    return Network().body.to(device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With a state, so that a checkpoint without it leads to other losses."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_alone(device: str) -> tuple[list[float], list[float]]:
    """Losses and weights of one process with the whole batches."""
    model = make_model(torch.device(device))
    optimizer = optimizer_of(model)
    losses = [train_step(model, optimizer, step, torch.device(device)) for step in range(NUM_STEPS)]
    return losses, weights_of(model)


def weights_of(model: nn.Module) -> list[float]:
    """All parameters as plain numbers, sharded ones as a whole."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def leave_all(out: str, **found: Any) -> None:
    """Leave what this rank found, its backend, process and report for the caller of the job."""
    leave(out, {"backend": dist.get_backend(), "report": get_start_report().to_dict(), "pid": os.getpid(), **found})


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
        return any(len(log.read_text().splitlines()) >= num_reports for log in Path(storage).glob("*/*/result.json"))

    assert wait_until(has_all, 60)


def report(loss: float, checkpoint: Checkpoint | None = None, of_rank0: bool = False) -> None:
    """Report from every rank; with a checkpoint, return when Ray's controller has it, however soon the run fails then.

    It takes one report of each rank at a time, so the third can be left when the first has been dealt with.
    """
    if of_rank0:
        report_rank0({"loss": loss}, checkpoint)
    else:
        ray.train.report({"loss": loss}, checkpoint=checkpoint)
    for _ in range(2 if checkpoint is not None else 0):
        ray.train.report({"loss": loss})


def resuming_function(config: dict[str, Any]) -> None:
    """DDP with a checkpoint from every rank, of which each goes on from its own; of rank 0 alone where a node is to be lost."""
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), ray.train.torch.get_device()
    is_elastic = config["is_elastic"]
    name = "model.pt" if is_elastic else f"rank{rank}.pt"
    model = ray.train.torch.prepare_model(make_model(device))
    optimizer, first = optimizer_of(model), 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / name, map_location=device)
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
                torch.save(state, Path(folder) / name)
                saved = Checkpoint.from_directory(folder)
            report(losses[-1], saved, is_elastic and saved is not None)
        if saved is not None and num_ranks == 3:
            leave_all(f"{config['out']}/three", first=first, losses=losses, device=str(device))
            total = torch.ones(1 << 16, device=device)
            while True:  # until the node of rank 2 is lost
                dist.all_reduce(total)
                total.fill_(float(total[0].item() == 3))
    out = f"{config['out']}/two" if is_elastic else config["out"]
    leave_all(out, first=first, losses=losses, weights=weights_of(model), device=str(device))


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
    leave_all(config["out"], first=first, losses=losses, weights=weights_of(model), device=str(device), rows=rows)


def resume(job: dict[str, Any]) -> list[dict[str, Any]]:
    """A run whose rank 1 fails once, and that Ray starts again; what each rank of the second attempt told."""
    make_trainer(job, resuming_function, max_failures=1, is_elastic=False).fit()
    return answers_in(job["out"])


def sharded(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Two ranks, restarted once, then three that go on from their checkpoint; what the ranks of both runs told."""
    job = {**job, "fraction": 0.33}
    result = make_trainer(job, sharded_function, run="two", max_failures=1, until=4, checkpoint=None).fit()
    two = answers_in(job["out"])
    more = {"until": NUM_STEPS, "checkpoint": result.checkpoint}
    make_trainer({**job, "num_workers": 3}, sharded_function, run="three", **more).fit()
    return [*two, *answers_in(job["out"])]


@ray.remote(num_cpus=0)
def _fit(trainer: TorchTrainer) -> None:
    trainer.fit()


def elastic(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Three ranks on two nodes with a device each, of which one is lost; what the ranks told before and after."""
    ray.shutdown()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 3, "num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}
    )
    lost = cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"CUDA_VISIBLE_DEVICES": "1"})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address)
    three = Path(job["out"], "three")
    trainer = make_trainer(
        {**job, "num_workers": (2, 3), "fraction": 0.5}, resuming_function, max_failures=5, is_elastic=True
    )
    run = _fit.remote(trainer)
    if not wait_until(lambda: len(list(three.glob("rank*.json"))) == 3, _WAIT_S):
        raise TimeoutError("three ranks never trained")
    cluster.remove_node(lost, allow_graceful=False)
    ray.get(run, timeout=_WAIT_S)
    found = [*answers_in(str(three)), *answers_in(f"{job['out']}/two")]
    ray.shutdown()
    cluster.shutdown()
    return found


JOBS = {"shape": shape, "failing": failing, "resume": resume, "sharded": sharded, "elastic": elastic}
