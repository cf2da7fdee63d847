"""Train with four workers on one GPU, each with a limit on its memory.

usage: python one_gpu.py [--num-workers N]

Without a GPU, Ray gets a logical one and the workers train on the CPU.
"""

import argparse

import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ray_fracbackend import FracTorchConfig


def make_data():
    rows = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, rows.sin().sum(dim=1, keepdim=True))


def megabytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def print_memory(model, optimizer):
    weights = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    sizes = megabytes(weights), megabytes(weight.grad for weight in weights), megabytes(states)
    print("each worker: parameters {:.1f} MB, gradients {:.1f} MB, optimizer {:.1f} MB".format(*sizes))
    if torch.cuda.is_available():
        largest = torch.cuda.max_memory_allocated() / 1e6
        print(f"largest amount of GPU memory so far: {largest:.1f} MB")


def train_func():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)]
    model = ray.train.torch.prepare_model(nn.Sequential(*layers))
    loader = DataLoader(make_data(), batch_size=64, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        losses = []
        for rows, targets in loader:
            loss = nn.functional.mse_loss(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()
        if rank == 0:
            if epoch == 0:
                print_memory(model, optimizer)
            print(f"epoch {epoch}: loss {mean:.1f}")
        ray.train.report({"epoch": epoch, "loss": mean})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=4)
    num_workers = parser.parse_args().num_workers

    if not torch.cuda.is_available():
        # A logical GPU, and one CPU more than the workers for the trainer of Train V1.
        ray.init("local", num_cpus=num_workers + 1, num_gpus=1)
    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=True,
            resources_per_worker={"CPU": 1, "GPU": 0.22},
        ),
        torch_config=FracTorchConfig(limit_gpu_memory=True, on_missing_cuda="cpu"),
    )
    result = trainer.fit()
    print(f"results in {result.path}")


if __name__ == "__main__":
    main()
