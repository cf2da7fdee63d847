"""How much faster a whole CPU training run gets: epochs of the demo under FracTorchConfig with ipc and with Gloo.

Both backends train in turn on the same machine, with the same seed; rank 0's seconds of each epoch but the first count.

usage: python benchmarks/ipc_demo.py [--rounds 3] [--epochs 6] [--workers 2] [--out FOLDER]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from common import parser, save
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.cli.demo import build_model, load_digits


def train(config: dict[str, Any]) -> None:
    """The demo's loop, without its output."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = ray.train.torch.prepare_data_loader(DataLoader(load_digits()[0], batch_size=32, shuffle=True))
    model = ray.train.torch.prepare_model(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    seconds = []
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        torch.distributed.barrier()
        started = time.perf_counter()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["path"]).write_text(json.dumps(seconds[1:]))
    ray.train.report({"loss": loss.item()})


def epochs_of(backend: str, num_workers: int, num_epochs: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        TorchTrainer(
            train,
            train_loop_config={"epochs": num_epochs, "path": str(path)},
            torch_config=FracTorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        seconds: list[float] = json.loads(path.read_text())
    return seconds


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--epochs", type=int, default=6)
    options.add_argument("--workers", type=int, default=2)
    arguments = options.parse_args()
    ray.init("local", num_cpus=arguments.workers + 2, log_to_driver=False, logging_level="ERROR")
    seconds: dict[str, list[float]] = {"gloo": [], "ipc": []}
    for _ in range(arguments.rounds):
        for backend, found in seconds.items():
            found += epochs_of(backend, arguments.workers, arguments.epochs)
    ray.shutdown()
    medians = {backend: statistics.median(found) for backend, found in seconds.items()}
    ratio = medians["gloo"] / medians["ipc"]
    print(f"epoch: gloo {medians['gloo'] * 1e3:.1f} ms, ipc {medians['ipc'] * 1e3:.1f} ms, gloo/ipc {ratio:.2f}")
    result = {"num_workers": arguments.workers, "median_s": medians, "gloo_over_ipc": ratio, "seconds": seconds}
    print(save("ipc_demo", arguments.out, result))


if __name__ == "__main__":
    main()
