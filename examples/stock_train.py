"""Train with stock Ray Train: several workers, each with a fraction of a GPU.

usage: python stock_train.py [--num-workers N]

With NCCL this fails, because the workers share one GPU. examples/one_gpu.py is
the same with the lines that change. The recipes run this file without edits,
by `ray-fracbackend run` and by environment variables.
"""

import argparse

import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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

    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=True,
            resources_per_worker={"CPU": 1, "GPU": 0.25},
        ),
    )
    result = trainer.fit()
    print(f"results in {result.path}")


if __name__ == "__main__":
    main()
