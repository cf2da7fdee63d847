"""Driver on the head node of a two-node Ray cluster, or on its own node without RAY_ADDRESS: runs one fit.

``net_cluster_driver.py FOLDER NAME`` writes ``FOLDER/NAME.json`` with ``error`` and what rank 0 wrote.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from ray_fracbackend import FracTorchConfig, get_start_report

# Read before ray.init, which sets the variable itself.
JOINS_CLUSTER = "RAY_ADDRESS" in os.environ


CONFIGS = {
    "stock": lambda: TorchConfig(backend="gloo", timeout_s=5),
    "ours": FracTorchConfig,
}


def train(folder: Path, is_ours: bool) -> None:
    """Run two steps of DDP, whose gradients must be equal on both nodes; rank 0 writes the result."""
    torch.manual_seed(ray.train.get_context().get_world_rank())
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    gradient = next(model.parameters()).grad
    both = [torch.zeros_like(gradient) for _ in range(2)]
    torch.distributed.all_gather(both, gradient)
    context = ray.train.get_context()
    if context.get_world_rank() == 0:
        seen: dict[str, Any] = {"equal_gradients": torch.equal(*both), "world_size": context.get_world_size()}
        if is_ours:
            report = get_start_report()
            seen["nodes"] = sorted({worker.node_ip for worker in report.workers})
            seen["rendezvous"] = report.rendezvous.reason
        (folder / "trained.json").write_text(json.dumps(seen))


def fit(name: str, folder: Path) -> dict[str, Any]:
    trained, config = folder / "trained.json", CONFIGS[name]()
    trained.unlink(missing_ok=True)
    trainer = TorchTrainer(
        lambda: train(folder, isinstance(config, FracTorchConfig)),
        scaling_config=ScalingConfig(
            num_workers=2,
            resources_per_worker={"slot": 1},
            placement_strategy="STRICT_SPREAD" if JOINS_CLUSTER else "PACK",
        ),
        torch_config=config,
        run_config=RunConfig(name=name, storage_path=str(folder / "results")),
    )
    error = None
    try:
        trainer.fit()
    except Exception as raised:
        error = str(raised)
    return {"error": error, "trained": json.loads(trained.read_text()) if trained.exists() else None}


def main() -> None:
    folder = Path(sys.argv[1])
    runtime_env = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    if JOINS_CLUSTER:
        ray.init(runtime_env=runtime_env)
    else:
        ray.init("local", num_cpus=3, resources={"slot": 2}, include_dashboard=False, runtime_env=runtime_env)
    name = sys.argv[2]
    (folder / f"{name}.json").write_text(json.dumps(fit(name, folder)))


if __name__ == "__main__":
    main()
