"""How many samples per second does DDP train if its ranks share one GPU, with each backend?

usage: python benchmarks/gpu_ddp.py [--ranks 2 4] [--backends ...] [--mps] [--budget-s 200] [--dry] [--out FOLDER]

A convolutional network with ResNet-18's shape and size (11 million parameters) and a transformer encoder (19 million),
in float32. The whole batch is the same for every number of ranks. ``none`` runs the same processes without
communication, which is the limit for every backend. One process without DDP is the baseline that sharing must beat.
Stock Gloo is the comparison. The transformer also runs with FSDP2. Gloo has no collectives for it on CUDA, so its case
ends with that reason.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import parser, save
from gpu_ranks import Cases, Rank, add_options, in_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# The most important cases come first, because the budget may end before the last one.
BACKENDS = ("none", "ipc", "staged", "gloo", "staged_gloo", "nccl")
_WARM_UP_STEPS = 3
_STEPS_S = 2.0


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        same = stride == 1 and num_in == num_out
        self.skip = nn.Identity() if same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(inputs) + self.skip(inputs))


def resnet(width: int) -> nn.Module:
    """Return two blocks of each width, as in ResNet-18; 11 million parameters at width 64."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    for number in range(4):
        stride = 1 if number == 0 else 2
        layers += [Block(widths[number], widths[number + 1], stride), Block(widths[number + 1], widths[number + 1], 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 100))


def transformer(width: int) -> nn.Module:
    """Return six encoder layers; 19 million parameters at width 512."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(width, 100))


def workload(name: str, dry: bool, samples: int, device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the model, this rank's part of a batch, and its labels."""
    torch.manual_seed(0)
    if name == "resnet":
        model, inputs = resnet(8 if dry else 64), torch.randn(samples, 3, *([32, 32] if dry else [128, 128]))
        labels = torch.randint(100, (samples,))
    else:
        width, length = (32, 8) if dry else (512, 128)
        model, inputs = transformer(width), torch.randn(samples, length, width)
        labels = torch.randint(100, (samples, length))
    return model.to(device), inputs.to(device), labels.to(device)


def sharded(model: nn.Module, rank: Rank) -> nn.Module:
    """Return the model under FSDP2, with each encoder layer as a unit."""
    mesh = init_device_mesh(rank.device.type, (rank.num_ranks,))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step_function(rank: Rank, name: str, samples: int, how: str) -> tuple[Callable[[], None], int]:
    """Return one training step and the number of the model's parameters."""
    model, inputs, labels = workload(name, rank.spec["dry"], samples, rank.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if rank.spec["backend"] != "none":
        model = sharded(model, rank) if how == "fsdp2" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()

    return step, num_parameters


def measure(rank: Rank) -> None:
    for name, how in (("resnet", "ddp"), ("transformer", "ddp"), ("transformer", "fsdp2")):
        if how == "fsdp2" and rank.spec["backend"] == "none":
            continue
        samples = rank.spec["batch"] // rank.num_ranks
        step, num_parameters = step_function(rank, name, samples, how)
        for _ in range(_WARM_UP_STEPS):
            step()
        num_steps = max(3, min(200, int(rank.spec["steps_s"] / rank.once(step))))

        def steps(step: Callable[[], None] = step, num_steps: int = num_steps) -> None:
            for _ in range(num_steps):
                step()

        seconds = rank.once(steps)
        rank.tell(
            {
                "model": name,
                "how": how,
                "num_parameters": num_parameters,
                "samples_per_step": samples * rank.num_ranks,
                "num_steps": num_steps,
                "step_ms": round(seconds / num_steps * 1e3, 4),
                "samples_per_s": round(samples * rank.num_ranks * num_steps / seconds, 2),
            }
        )


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    add_options(options, 200)
    arguments = options.parse_args()
    spec = {"batch": 8 if arguments.dry else 64, "steps_s": 0.05 if arguments.dry else _STEPS_S}
    all_ranks = arguments.ranks[:1] if arguments.dry else arguments.ranks
    cases = Cases(__file__, arguments)
    with cases.running():
        cases.run("none", 1, **spec)
        for num_ranks in all_ranks:
            for backend in arguments.backends:
                cases.run(backend, num_ranks, **spec)
    print(save("gpu_ddp", arguments.out, cases.results()))


if __name__ == "__main__" and not in_rank(measure):
    main()
