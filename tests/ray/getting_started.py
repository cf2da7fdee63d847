"""The training script of Ray's "Get Started with Distributed Training using PyTorch", with small things in place of what
torchvision would download: a residual network with the same first layer, and images of FashionMNIST's shape."""

import os
import tempfile

import ray.train.torch
import torch
from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset


class Block(torch.nn.Module):
    """A residual block of two 3x3 convolutions."""

    def __init__(self, channels):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(channels, channels, 3, padding=1),
            torch.nn.BatchNorm2d(channels),
            torch.nn.ReLU(),
            torch.nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def small_resnet(num_classes):
    model = torch.nn.Sequential()
    model.conv1 = torch.nn.Conv2d(1, 16, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
    model.block = Block(16)
    model.pool = torch.nn.AdaptiveAvgPool2d(1)
    model.flatten = torch.nn.Flatten()
    model.fc = torch.nn.Linear(16, num_classes)
    return model


def images_like_fashion_mnist(count=256):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)
    )


def train_func():
    # Model, Loss, Optimizer
    model = small_resnet(num_classes=10)
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
