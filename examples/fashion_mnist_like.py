"""The script of Ray's "Get Started with Distributed Training using PyTorch" with FracTorchConfig: two workers share one GPU.

usage: python fashion_mnist_like.py [RESULTS_FOLDER]

The images are random and have FashionMNIST's shape, so nothing is downloaded. The model is ResNet-18 with an eighth of its
channels, which a CPU trains in seconds. The GPU is only a logical resource of Ray here, so the script runs on any machine. On a
machine with a GPU, leave ``num_gpus`` and ``on_missing_cuda`` out.
"""

import os
import sys
import tempfile

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from ray_fracbackend import FracTorchConfig


class BasicBlock(torch.nn.Module):
    """ResNet's basic block: two 3x3 convolutions and a shortcut."""

    def __init__(self, num_inputs, num_outputs, stride):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False),
            torch.nn.BatchNorm2d(num_outputs),
            torch.nn.ReLU(),
            torch.nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(num_outputs),
        )
        self.shortcut = torch.nn.Identity()
        if stride != 1 or num_inputs != num_outputs:
            self.shortcut = torch.nn.Sequential(
                torch.nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), torch.nn.BatchNorm2d(num_outputs)
            )

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18_like(num_classes, width=8):
    """Return a ResNet-18 for images with one channel: four stages of two blocks. The original has width 64."""
    layers = [
        torch.nn.Conv2d(1, width, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False),
        torch.nn.BatchNorm2d(width),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, stride=2, padding=1),
    ]
    num_inputs = width
    for stage in range(4):
        num_outputs = width << stage
        layers += [BasicBlock(num_inputs, num_outputs, 2 if stage else 1), BasicBlock(num_outputs, num_outputs, 1)]
        num_inputs = num_outputs
    pool = torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(*layers, pool, torch.nn.Flatten(), torch.nn.Linear(num_inputs, num_classes))


def images_like_fashion_mnist(count=256):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)
    )


def train_func():
    # Model, Loss, Optimizer
    model = resnet18_like(num_classes=10)
    # [1] Prepare model.
    model = ray.train.torch.prepare_model(model)
    # model.to("cuda")  # This is done by `prepare_model`
    criterion = CrossEntropyLoss()
    optimizer = Adam(model.parameters(), lr=0.001)

    # Data
    train_loader = DataLoader(images_like_fashion_mnist(), batch_size=64, shuffle=True)
    # [2] Prepare dataloader.
    train_loader = ray.train.torch.prepare_data_loader(train_loader)

    # Training
    for epoch in range(3):
        if ray.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)

        for images, labels in train_loader:
            # This is done by `prepare_data_loader`!
            # images, labels = images.to("cuda"), labels.to("cuda")
            outputs = model(images)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        # [3] Report metrics and checkpoint.
        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            torch.save(model.module.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))
            ray.train.report(
                metrics,
                checkpoint=ray.train.Checkpoint.from_directory(temp_checkpoint_dir),
            )
        if ray.train.get_context().get_world_rank() == 0:
            print(metrics)


def main(results_folder):
    ray.init("local", num_cpus=3, num_gpus=1)
    # [4] Configure scaling and resource requirements.
    scaling_config = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5})

    # [5] Launch distributed training job.
    trainer = TorchTrainer(
        train_func,
        scaling_config=scaling_config,
        torch_config=FracTorchConfig(on_missing_cuda="cpu"),  # the only change for FracTorchConfig
        run_config=RunConfig(storage_path=results_folder),
    )
    result = trainer.fit()

    # [6] Load the trained model.
    with result.checkpoint.as_directory() as checkpoint_dir:
        model = resnet18_like(num_classes=10)
        model.load_state_dict(torch.load(os.path.join(checkpoint_dir, "model.pt")))
    print(f"loaded the model of epoch {result.metrics['epoch']}")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="fashion_mnist_like_"))
