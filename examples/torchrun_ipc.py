"""DDP with torchrun, without Ray: the gradients go through shared memory of the machine instead of TCP. Linux only.

usage: torchrun --standalone --nproc-per-node 2 torchrun_ipc.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ray_fracbackend.ipc  # noqa: F401  registers the backend
from ray_fracbackend import verify_process_group


def main():
    dist.init_process_group("ipc")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        # With fewer devices than ranks, ranks share a device, and LOCAL_RANK is not the index of the device.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    figures = verify_process_group(device=device, timeout_s=60)

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 8).to(device)[rank::num_ranks]
    targets = inputs.sum(dim=1, keepdim=True)
    for _ in range(100):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
    if rank == 0:
        print(
            f"{dist.get_backend()}, {num_ranks} ranks on {device.type}, all_reduce of 1 KiB {figures.latency_s:.6f} s"
        )
        print(f"loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
