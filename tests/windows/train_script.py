"""A user's training script; the tests run it as such, also from other folders. It writes its results to FOLDER.

usage: python train_script.py FOLDER [--steps N] [--kill-in-start] [--remove-adapter]
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from ray_fracbackend import FracTorchConfig, report_rank0
from ray_fracbackend.start.backend import FracTorchBackend

NAMES = ("MASTER_ADDR", "USE_LIBUV", "GLOO_SOCKET_IFNAME")
# Of a machine with an adapter that can be removed during training: ci/wine.py.
REMOVE, REMOVED = Path("W:/remove-adapter"), Path("W:/adapter-removed")


def note(folder, rank, phase):
    Path(folder, f"{phase}.{rank}").write_text(str(os.getpid()))


def sockets():
    """Return this process's own addresses that are not loopback, except the port of rank 0's store."""
    found = [each.laddr for each in psutil.Process().net_connections("tcp") if each.laddr]
    own = {address.ip for address in found if address.port != int(os.environ["MASTER_PORT"])}
    return sorted(own - {"127.0.0.1", "::1", "::ffff:127.0.0.1"})


def remove_adapter(rank):
    """Remove the machine's network adapter, and form a group without it."""
    if rank == 0:
        REMOVE.touch()
        while not REMOVED.exists():
            time.sleep(0.1)
    dist.barrier()
    dist.all_reduce(torch.ones(1 << 20))
    dist.all_reduce(torch.ones(3), group=dist.new_group())


def train_func(config):
    rank = dist.get_rank()
    own = sockets()
    environment = {name: os.environ.get(name) for name in NAMES}
    model = ray.train.torch.prepare_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    note(config["folder"], rank, "training")
    for _ in range(config["steps"]):
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=ray.train.torch.get_device())).mean().backward()
        optimizer.step()
        if config["steps"] > 10:
            time.sleep(0.1)
    if config["remove_adapter"]:
        remove_adapter(rank)
    total = torch.full((), rank + 1.0)
    dist.all_reduce(total)
    with tempfile.TemporaryDirectory() as made:
        torch.save(model.module.state_dict(), Path(made, "model.pt"))
        report_rank0({"total": total.item(), "sockets": own, **environment}, Checkpoint.from_directory(made))


def kill_itself(*_args, **_kwargs):
    psutil.Process().kill()
    time.sleep(60)


def kill_at_rendezvous():
    from ray_fracbackend.worker import store

    store.connect_store = kill_itself


class KillingBackend(FracTorchBackend):
    """End rank 1 at the rendezvous of the first start; V2 then starts the workers again."""

    def on_start(self, worker_group, backend_config):
        folder = backend_config.folder
        if not Path(folder, "started.1").exists():
            for rank in range(2):
                worker_group.execute_single(rank, note, folder, rank, "started")
            worker_group.execute_single(1, kill_at_rendezvous)
        try:
            super().on_start(worker_group, backend_config)
        except Exception as error:
            # Only some versions of Ray's log contain it.
            Path(folder, "error").write_text(f"{type(error).__name__}: {error}")
            raise


@dataclass
class KillingConfig(FracTorchConfig):
    folder: str = ""

    @property
    def backend_cls(self):
        return KillingBackend


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--kill-in-start", action="store_true")
    parser.add_argument("--remove-adapter", action="store_true")
    options = parser.parse_args()
    folder = os.path.abspath(options.folder)

    # A logical GPU, as for a user without a real one.
    ray.init("local", num_cpus=3, num_gpus=1, include_dashboard=False)
    config = {"on_missing_cuda": "cpu", "start_timeout_s": 60.0}
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"folder": folder, "steps": options.steps, "remove_adapter": options.remove_adapter},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}),
        torch_config=KillingConfig(folder=folder, **config) if options.kill_in_start else FracTorchConfig(**config),
        run_config=RunConfig(name="run", storage_path=folder),
    )
    found = {}
    started = time.perf_counter()
    try:
        result = trainer.fit()
        with result.checkpoint.as_directory() as made:
            found = {
                "metrics": result.metrics,
                "files": os.listdir(made),
                "keys": sorted(torch.load(Path(made, "model.pt"))),
            }
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    found["fit_s"] = time.perf_counter() - started
    Path(folder, "result.json").write_text(json.dumps(found, default=str), encoding="utf-8")
    ray.shutdown()


if __name__ == "__main__":
    main()
