"""A script for stock Ray Train that does not mention ray_fracbackend. Run by test_run.py and by itself.

usage: python stock_script.py KIND[,KIND ...] FOLDER
"""

import json
import os
import sys

import ray
import ray.train
import ray.train.torch
import stock_helper
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

CONFIGS = {
    "gloo": lambda: {"torch_config": TorchConfig(backend="gloo", timeout_s=77)},
    "nccl": lambda: {"torch_config": ray.train.torch.config.TorchConfig("nccl")},
}


class Net(torch.nn.Module):
    """A model whose class exists only in this script."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, data):
        return self.layer(data)


def train_func(config):
    model = ray.train.torch.prepare_model(Net())
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    rank = dist.get_rank()
    found = {
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "timeout_s": dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "started_by_us": "ray_fracbackend.worker.process_group" in sys.modules,
        "helper": stock_helper.answer(),
    }
    with open(os.path.join(config["out"], f"{config['name']}-rank{rank}.json"), "w") as file:
        json.dump(found, file)
    ray.train.report({"loss": loss.item()})


def make_trainer(kind, out, name):
    return TorchTrainer(
        train_func,
        train_loop_config={"out": out, "name": name},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}),
        run_config=RunConfig(name=name, storage_path=out),
        **CONFIGS.get(kind, dict)(),
    )


def fit_in_trial(config):
    make_trainer("none", config["out"], config["name"]).fit()


def tune_over_trainers(out):
    from ray import tune

    space = {"out": out, "name": tune.grid_search(["a", "b"])}
    results = tune.Tuner(fit_in_trial, param_space=space, run_config=tune.RunConfig(storage_path=out)).fit()
    assert not results.errors, results.errors


def main():
    print("argv", sys.argv[1:], "main", __name__, "path", sys.path[:2], "cwd", os.getcwd())
    kinds, out = sys.argv[1:3]
    if kinds == "exit":
        sys.exit(7)
    if kinds == "raise":
        raise KeyError("from the script")
    ray.init("local", num_cpus=8, num_gpus=1)
    for kind in kinds.split(","):
        if kind == "tune":
            tune_over_trainers(out)
        else:
            make_trainer(kind, out, kind).fit()


if __name__ == "__main__":
    main()
