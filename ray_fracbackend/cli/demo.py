"""Train a small network on scikit-learn's digits with two workers at half a GPU each: ``ray-fracbackend demo``.

An ordinary Ray Train script, which also runs as ``python -m ray_fracbackend.cli.demo``. It uses this package only for the argument
``torch_config``. Without a GPU the script declares one logical GPU to Ray, and the workers train on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ray_fracbackend import FracTorchConfig, get_start_report

_FILE = "model.pt"
# After this number of epochs a lower accuracy is an error.
_NUM_EPOCHS, _ACCURACY = 10, 0.9


def build_model() -> nn.Module:
    """Return the network: 8x8 grey images to ten digits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Load scikit-learn's 1,797 handwritten digits, as float32 in 0 to 1: four fifths for training, one fifth for testing."""
    from sklearn.datasets import load_digits as load

    data = load()
    images = torch.tensor(data.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(data.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    split = len(labels) * 4 // 5
    train, test = order[:split], order[split:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of correct predictions, in 0 to 1."""
    images, labels = data.tensors
    device = next(model.parameters()).device
    with torch.no_grad():
        answers = model(images.to(device)).argmax(dim=1).cpu()
    share: float = (answers == labels).float().mean().item()
    return share


def train_digits(config: dict[str, Any]) -> None:
    """Train one worker's share: the train function."""
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    # The decision and its reason; a start with Ray's TorchConfig has no report.
    start = None if config["stock"] else str(get_start_report())
    train_set, test_set = load_digits()
    loader = prepare_data_loader(DataLoader(train_set, batch_size=32, shuffle=True))
    model = prepare_model(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(1, config["epochs"] + 1):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": accuracy(model, test_set), "start": start}
        _report(metrics, model, rank)


def _report(metrics: dict[str, Any], model: nn.Module, rank: int) -> None:
    """Report metrics from every rank, a checkpoint only from rank 0: two ranks must not write one file."""
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        torch.save(inner.state_dict(), os.path.join(folder, _FILE))
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    """Train, load the checkpoint back and print its accuracy.

    Raises:
        SystemExit: The accuracy is too low.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=_NUM_EPOCHS)
    parser.add_argument("--stock", action="store_true", help="use Ray's own TorchConfig, for comparison")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: declaring one logical GPU to Ray; training runs on the CPU", flush=True)
    # V2's report() waits for the controller, which by default polls its workers every 2 s; this script reports every epoch.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    ray.init(
        "local",
        num_cpus=max(4, os.cpu_count() or 1),
        num_gpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    config = TorchConfig() if options.stock else FracTorchConfig(on_missing_cuda="cpu")
    print(f"training with two workers at half a GPU each, torch_config={type(config).__name__}", flush=True)
    # Windows keeps files open for a while.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as storage:
        trainer = TorchTrainer(
            train_digits,
            train_loop_config=vars(options),
            torch_config=config,
            scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}),
            run_config=RunConfig(name="digits", storage_path=storage),
        )
        result = trainer.fit()
        with result.checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, _FILE), weights_only=True)
    ray.shutdown()
    print(f"\n{result.metrics['start'] or ''}\n", flush=True)
    for row in result.metrics_dataframe.itertuples():
        print(f"epoch {row.epoch}/{options.epochs}: loss {row.loss:.3f}, accuracy {row.accuracy:.3f}", flush=True)
    model = build_model()
    model.load_state_dict(state)
    final = accuracy(model, load_digits()[1])
    print(f"checkpoint of rank 0 loaded back: accuracy {final:.3f}", flush=True)
    if final <= _ACCURACY and options.epochs >= _NUM_EPOCHS:
        sys.exit(f"accuracy {final:.3f} after {options.epochs} epochs: it must be above {_ACCURACY}")


if __name__ == "__main__":
    main()
