"""Command ``test``: ten DDP steps of a small model. On every worker.

The steps also check the result: every rank trains on a part of one batch, and the weights must equal those of one process that
trains on the whole batch.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from ray.train.torch import get_device
from torch import nn

NUM_STEPS = 10
_ROWS_PER_RANK, _WIDTH = 8, 64


def train(config: dict[str, Any]) -> None:
    """Train this rank's part of a batch under DDP, and the whole batch in this process without the other ranks.

    Args:
        config: ``results``: a queue for the rank, its median seconds of a step, its first and last loss, and the largest
            difference of a weight from those of one process.
    """
    rank, device = dist.get_rank(), get_device()
    torch.manual_seed(0)  # the same model and data on every rank
    alone = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1)).double()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(alone).to(device))
    inputs = torch.randn(dist.get_world_size(), _ROWS_PER_RANK, _WIDTH, dtype=torch.float64)
    targets = inputs.sum(dim=-1, keepdim=True) / _WIDTH**0.5
    losses, seconds = _run(model, inputs[rank].to(device), targets[rank].to(device))
    _run(alone, inputs.flatten(0, 1), targets.flatten(0, 1))
    difference = largest_difference(model.module, alone)
    config["results"].put((rank, statistics.median(seconds), losses[0], losses[-1], difference))


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between the weights of two models of the same shape; NaN if a weight is NaN."""
    ours, theirs = (nn.utils.parameters_to_vector(each.parameters()).detach().cpu() for each in (model, other))
    return (ours - theirs).abs().max().item()  # torch's max() keeps NaN, Python's does not


def _run(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], list[float]]:
    """Train, and return the loss before each step and the seconds of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, seconds = [], []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, seconds
