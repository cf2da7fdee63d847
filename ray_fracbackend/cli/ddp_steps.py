"""Command ``test``: start a real group of workers, verify it, and run DDP steps of a small model. Driver and workers.

The steps also check the result: every rank trains on a part of each batch, and the weights must equal those of one process that
trains on whole batches.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from torch import nn

from ray_fracbackend._ray import release_workers, worker_addresses
from ray_fracbackend.backend import Start
from ray_fracbackend.cli.workers.actors import ProbeGroup, check_plannable, probe_workers
from ray_fracbackend.collect import gather
from ray_fracbackend.config import FracTorchConfig
from ray_fracbackend.decide.worker_info import ranks_text
from ray_fracbackend.report import StartReport
from ray_fracbackend.timeouts import Deadline

NUM_STEPS = 10
_ROWS_PER_RANK, _WIDTH = 8, 64
# In float64 the only difference comes from the order of the sums.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Steps:
    """Steps of one rank.

    Attributes:
        step_s: Median seconds of a step.
        first_loss: Mean loss over all ranks before training.
        last_loss: The same at the end.
        difference: Largest difference of a weight from those of one process that trains on all ranks' batches.
    """

    step_s: float
    first_loss: float
    last_loss: float
    difference: float


@dataclass(frozen=True)
class GroupTest:
    """Result of a test.

    Attributes:
        report: Report of the start.
        steps: Steps of each rank.
    """

    report: StartReport
    steps: tuple[Steps, ...]

    @property
    def difference(self) -> float:
        """Largest difference of any rank; NaN if one rank has NaN."""
        return torch.tensor([step.difference for step in self.steps], dtype=torch.float64).max().item()

    @property
    def wrong_ranks(self) -> list[int]:
        """Ranks whose weights differ from those of one process, or are NaN."""
        return [rank for rank, step in enumerate(self.steps) if not step.difference <= _TOLERANCE]

    def problem(self) -> str | None:
        """Return the problem, None if all ranks have the weights of one process."""
        if not self.wrong_ranks:
            return None
        return (
            f"the weights of {ranks_text(self.wrong_ranks)} differ from those of one process by more than {_TOLERANCE:.1g}: a "
            "collective or a device returns wrong values. Report it with the output of `ray-fracbackend doctor`"
            f"{'.' if self.report.backend == 'gloo' else ', and compare with `--backend gloo`.'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for ``json.dumps``; None replaces a number that is not finite."""
        steps = [
            {name: value if math.isfinite(value) else None for name, value in asdict(step).items()}
            for step in self.steps
        ]
        return {"report": self.report.to_dict(), "steps": steps}

    def to_text(self) -> str:
        """Return the report's table, and the outcome of the steps in one line."""
        first = self.steps[0]
        step_s = max(step.step_s for step in self.steps)
        text = (
            f"{NUM_STEPS} DDP steps on {len(self.steps)} worker{'s' if len(self.steps) > 1 else ''}: {step_s * 1e3:.2f} ms per step, "
            f"loss {first.first_loss:.4f} to {first.last_loss:.4f}, largest difference from one process {self.difference:.1g}"
        )
        if problem := self.problem():
            text += f"\nproblem: {problem}"
        return f"{self.report.to_text()}\n\n{text}"


def _start(group: ProbeGroup, settings: FracTorchConfig) -> StartReport:
    """Start the workers; on failure, kill those that are still busy with the start."""
    start = Start(group, settings)
    try:
        return start.run()
    except BaseException as error:
        release_workers(group, error)
        raise


def run_group_test(
    scaling_config: ScalingConfig, torch_config: FracTorchConfig, *, timeout_s: float = 30.0, fixed: bool = False
) -> GroupTest:
    """Start a group of workers, verify it, and run `NUM_STEPS` DDP steps of a small model.

    Needs a connection to Ray, and no storage that the nodes share. Leaves no actor and no placement group behind.

    Args:
        scaling_config: As for a TorchTrainer, with a fixed number of workers of at least 1.
        torch_config: The settings. ``start_timeout_s`` is also the time limit of the steps.
        timeout_s: How long to wait for the resources, in seconds.
        fixed: As for `plan_workers`.

    Raises:
        InsufficientResourcesError: The cluster has not placed the workers in time.
        FracBackendError: The start or the steps failed; the message names rank, node and step.
        ValueError: There is nothing to test: the number of workers is not fixed, or the start is left to Ray.
    """
    settings = torch_config.checked_copy()
    check_plannable(scaling_config, settings)
    with probe_workers(scaling_config, settings, timeout_s, fixed) as group:
        report = _start(group, settings)
        refs = [
            group.execute_single_async(worker.rank, train, report.plan.decision.device_of(worker))
            for worker in report.workers
        ]
        steps = gather(refs, worker_addresses(group), Deadline(settings.start_timeout_s), f"{NUM_STEPS} DDP steps")
        return GroupTest(report, tuple(steps))


def train(device: str) -> Steps:
    """Train this rank's part of each batch under DDP, and whole batches in this process without the other ranks. On every worker."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = _batches(size)
    model = nn.parallel.DistributedDataParallel(_model().to(device))
    part = slice(rank * _ROWS_PER_RANK, (rank + 1) * _ROWS_PER_RANK)
    losses, seconds = _run(model, [(inputs[part].to(device), targets[part].to(device)) for inputs, targets in batches])
    alone = _model()
    _run(alone, batches)
    whole = torch.tensor([losses[0], losses[-1]], dtype=torch.float64, device=device)
    dist.all_reduce(whole)
    first, last = (whole / size).tolist()
    return Steps(statistics.median(seconds), first, last, largest_difference(model.module, alone))


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between the weights of two models of the same shape; NaN if a weight is NaN."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    # torch's max() keeps NaN, Python's does not.
    return (
        torch.stack([(ours.detach().cpu() - theirs.detach().cpu()).abs().max() for ours, theirs in pairs]).max().item()
    )


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1)).double()


def _batches(size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(NUM_STEPS):
        inputs = torch.randn(size * _ROWS_PER_RANK, _WIDTH, generator=generator, dtype=torch.float64)
        batches.append((inputs, inputs.sum(dim=1, keepdim=True) / _WIDTH**0.5))
    return batches


def _run(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[float], list[float]]:
    """Train, and return the loss before each step and the seconds of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, seconds = [], []
    for inputs, targets in batches:
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, seconds
