"""Count the copies, kernels, events and waits of an all_reduce of CUDA tensors.

usage: python ci/cuda.py python benchmarks/cuda_counts.py

Runs on the emulated CUDA runtime, which counts them (ci/cuda/counters.cpp). Counts do not depend on the machine. Speed
does, and is not measured. A row is the second call of its kind in a group; the first call sets the group up.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import parser, save
from gpu_ranks import Cases, Rank, add_options, in_rank
from rig_counters import count_all_reduce

_SIZES = (4 << 10, 1 << 20, 25 << 20)
_BACKENDS = ("ipc", "staged", "gloo")
_RANKS = (2, 4, 8)
_DTYPES = ("float32", "bfloat16")


def _count(rank: Rank) -> None:
    for size in rank.spec["sizes"]:
        found = asdict(count_all_reduce(size, getattr(torch, rank.spec["dtype"]), rank.device))
        ranks: list[Any] = [None] * rank.num_ranks
        dist.all_gather_object(ranks, found, group=rank.control)
        rank.tell({"dtype": rank.spec["dtype"], "num_bytes": size, "ranks": ranks})


def main() -> None:
    if in_rank(_count):
        return
    command = parser(__doc__.splitlines()[0])
    add_options(command, 900)
    command.add_argument("--sizes", type=int, nargs="+", default=_SIZES, metavar="BYTES")
    command.add_argument("--ranks", type=int, nargs="+", default=_RANKS, metavar="N")
    command.add_argument("--backends", nargs="+", default=_BACKENDS, metavar="NAME")
    options = command.parse_args()
    options.case_s = 300.0
    cases = Cases(__file__, options)
    with cases.running():
        for backend in options.backends:
            # A rank copies the same to the host and back, whatever the number of ranks.
            for num_ranks in options.ranks if backend == "ipc" else options.ranks[:1]:
                for dtype in _DTYPES:
                    cases.run(backend, num_ranks, dtype=dtype, sizes=list(options.sizes))
    print(f"written to {save(Path(__file__).stem, options.out, cases.results())}")


if __name__ == "__main__":
    main()
