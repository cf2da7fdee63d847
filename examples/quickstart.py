"""Train a small network with DDP on two workers that share one GPU.

usage: python quickstart.py
"""

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

from ray_fracbackend import FracTorchConfig


def train_func():
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Each worker has its own batch; DDP averages the gradients.
    rank = ray.train.get_context().get_world_rank()
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank)).to(get_device())
    targets = inputs.sum(dim=1, keepdim=True)
    for step in range(1, 41):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f} on {get_device()}")
    ray.train.report({"loss": loss.item()})


if __name__ == "__main__":
    # One GPU for Ray to divide. On a machine without a GPU it is only a logical resource, and the workers train on the CPU.
    ray.init("local", num_cpus=3, num_gpus=1)
    result = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=2,
            use_gpu=True,
            resources_per_worker={"GPU": 0.5, "CPU": 1},
        ),
        torch_config=FracTorchConfig(
            on_missing_cuda="cpu",
        ),
    ).fit()
    print(f"results in {result.path}")
