"""How long is an all_reduce between ranks that share one GPU, by each backend, beside a copy on the device?

usage: python benchmarks/gpu_all_reduce.py [--ranks 2 4 8] [--backends ...] [--budget-s 270] [--dry] [--out FOLDER]

Backends: ``ipc`` (device memory), ``staged`` (pinned host memory over shared host memory), ``staged_gloo`` (the same over Gloo),
``gloo``, ``nccl`` (2.30 or newer, with its multi-rank flags), ``nccl_hostid`` (every rank says it is on
a host of its own; for the record), and ``copy``, a device-to-device copy of the tensor by every rank at one time. With MPS
as well where its daemon can be started. Medians of calls that begin after a barrier and end when the last rank is through.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from common import parser, save
from gpu_ranks import Cases, Rank, add_options, in_rank, mps

SIZES = (4 << 10, 64 << 10, 1 << 20, 25 << 20, 256 << 20)
BACKENDS = ("copy", "ipc", "staged", "gloo", "staged_gloo", "nccl", "nccl_hostid")
_CALLS_S = 0.3


def measure(rank: Rank) -> None:
    """Every size in turn; the answer is checked once a size."""
    for num_bytes in rank.spec["sizes"]:
        tensor = torch.full((num_bytes // 4,), float(rank.rank + 1), device=rank.device)
        target = torch.empty_like(tensor)
        if rank.spec["backend"] != "copy":
            dist.all_reduce(tensor)
            expected = rank.num_ranks * (rank.num_ranks + 1) / 2
            if not bool((tensor == expected).all()):
                raise RuntimeError(f"Error: all_reduce of {num_bytes} bytes is wrong on rank {rank.rank}")
            tensor.zero_()  # zeros stay zeros however often they are summed

        def call(tensor: torch.Tensor = tensor, target: torch.Tensor = target) -> None:
            if rank.spec["backend"] == "copy":
                target.copy_(tensor)
            else:
                dist.all_reduce(tensor)

        seconds = rank.time_calls(call, _CALLS_S)
        p25, median, p75 = statistics.quantiles(seconds, n=4)
        rank.tell(
            {
                "num_bytes": num_bytes,
                "num_calls": len(seconds),
                "median_ms": round(median * 1e3, 5),
                "p25_ms": round(p25 * 1e3, 5),
                "p75_ms": round(p75 * 1e3, 5),
            }
        )


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    add_options(options, 270)
    arguments = options.parse_args()
    sizes = SIZES[:2] if arguments.dry else SIZES
    all_ranks = arguments.ranks[:1] if arguments.dry else arguments.ranks
    cases = Cases(__file__, arguments)
    cases.run("copy", 1, sizes=sizes)
    for num_ranks in all_ranks:
        for backend in arguments.backends:
            cases.run(backend, num_ranks, sizes=sizes)
    with mps() as started:
        if isinstance(started, dict):
            for num_ranks in all_ranks:
                for backend in (name for name in arguments.backends if name != "nccl_hostid"):
                    cases.run(backend, num_ranks, started, sizes=sizes)
    missing = started if isinstance(started, str) else None
    print(save("gpu_all_reduce", arguments.out, {"dry": arguments.dry, "no_mps": missing, "rows": cases.rows}))


if __name__ == "__main__" and not in_rank(measure):
    main()
