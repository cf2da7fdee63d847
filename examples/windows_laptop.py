"""Train on one Windows laptop: two workers share the GPU, and every worker reports a checkpoint with the same file name.

usage: python windows_laptop.py [--stock] [--epochs N] [--results FOLDER]

The script also runs on Linux and macOS, and without a GPU. Then the GPU is only a logical resource of Ray, and the workers train on
the CPU. ``--stock`` uses Ray's own ``TorchConfig("gloo")`` instead. Without a GPU it requests none, because stock cannot train GPU
workers on the CPU.
"""

import argparse
import os
import tempfile

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ray_fracbackend import FracTorchConfig


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; halves height and width. With so few steps the statistics need a momentum above 0.1."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(num_outputs, momentum=0.5),
            nn.ReLU(),
            nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_outputs, momentum=0.5),
        )
        self.shortcut = nn.Conv2d(num_inputs, num_outputs, 1, stride=2, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet_like():
    blocks = [ResidualBlock(32 << stage, 64 << stage) for stage in range(4)]
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )


def images_like_mnist(count=512):
    """Return float32 images (count, 1, 28, 28), which are ten patterns with noise, and their int64 digits (count,)."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 28, 28, generator=generator)
    digits = torch.randint(10, (count,), generator=generator)
    return TensorDataset(patterns[digits] + 0.3 * torch.randn(count, 1, 28, 28, generator=generator), digits)


def train_func(config):
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(resnet_like())
    loader = ray.train.torch.prepare_data_loader(DataLoader(images_like_mnist(), batch_size=64, shuffle=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        right = 0
        for images, digits in loader:
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (scores.argmax(1) == digits).sum().item()
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, os.path.join(folder, "checkpoint.pt"))
            accuracy = right / len(loader.sampler)
            # Every worker reports the same file name: with stock Ray on Windows this raises PermissionError [WinError 32].
            ray.train.report({"epoch": epoch, "accuracy": accuracy}, checkpoint=Checkpoint.from_directory(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", action="store_true", help='use Ray\'s TorchConfig("gloo")')
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--results", default=None, help="folder for the results; by default a temporary one")
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    ray.init("local", num_cpus=3, num_gpus=1)
    # Not 0.5: the display driver needs memory too, and what no longer fits goes to system memory, slowly and without an error.
    shared = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.4})
    no_gpu = ScalingConfig(num_workers=2)
    # A worker that needs more than its part of the memory gets an OutOfMemoryError.
    ours = FracTorchConfig(on_missing_cuda="cpu", limit_gpu_memory=True)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs},
        scaling_config=no_gpu if options.stock and not has_gpu else shared,
        torch_config=TorchConfig("gloo") if options.stock else ours,
        run_config=RunConfig(name="laptop", storage_path=options.results or tempfile.mkdtemp(prefix="windows_laptop_")),
    )
    result = trainer.fit()

    with result.checkpoint.as_directory() as folder:
        state = torch.load(os.path.join(folder, "checkpoint.pt"), map_location="cpu")
    model = resnet_like()
    model.load_state_dict(state["model"])
    images, digits = images_like_mnist().tensors
    with torch.no_grad():
        accuracy = (model.eval()(images).argmax(1) == digits).float().mean().item()
    print(f"loaded the checkpoint of epoch {state['epoch']}: {accuracy:.0%} of the digits are right")
    ray.shutdown()


if __name__ == "__main__":
    main()
