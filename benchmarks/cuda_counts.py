"""Count the copies, kernels, events and waits of an all_reduce of CUDA tensors.

usage: python ci/cuda.py python benchmarks/cuda_counts.py

Runs on the emulated CUDA runtime, which counts them (ci/cuda/counters.cpp). Counts do not depend on the machine. Speed
does, and is not measured. A row is the second call of its kind in a group; the first call sets the group up.

With `python ci/cuda.py --like gpu` a row also has, for each rank, how often a call waited for the process's time slice.
This does depend on the machine where a kernel is longer than a slice, as that of a large tensor is here.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from common import parser, save
from gpu_ranks import Cases, Rank, add_options, in_rank
from rig_counters import count_all_reduce, counters

_SIZES = (4 << 10, 1 << 20, 25 << 20)
_BACKENDS = ("ipc", "staged", "gloo")
_RANKS = (2, 4, 8)
_DTYPES = ("float32", "bfloat16")
_IS_LIKE_GPU = os.environ.get("CUDA_RIG_LIKE") == "gpu"


def _turns(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return how often this rank waits for its time slice in a call: the median of ten, each from a barrier to its end."""
    tensor, waits = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device), []
    for _ in range(12):
        dist.barrier()
        before = counters().slice_waits
        dist.all_reduce(tensor)
        torch.cuda.synchronize(device)
        waits.append(counters().slice_waits - before)
    return statistics.median(waits[2:])


def _count(rank: Rank) -> None:
    dtype = getattr(torch, rank.spec["dtype"])
    for size in rank.spec["sizes"]:
        found = asdict(count_all_reduce(size, dtype, rank.device))
        if _IS_LIKE_GPU:
            found["turns"] = _turns(size, dtype, rank.device)
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
    command.add_argument("--dtypes", nargs="+", default=_DTYPES, metavar="NAME")
    command.add_argument("--backends", nargs="+", default=_BACKENDS, metavar="NAME")
    options = command.parse_args()
    options.case_s = 300.0
    cases = Cases(__file__, options)
    with cases.running():
        for backend in options.backends:
            # A rank copies the same to the host and back, whatever the number of ranks.
            for num_ranks in options.ranks if backend == "ipc" or _IS_LIKE_GPU else options.ranks[:1]:
                for dtype in options.dtypes:
                    cases.run(backend, num_ranks, dtype=dtype, sizes=list(options.sizes))
    print(f"written to {save('cuda_turns' if _IS_LIKE_GPU else 'cuda_counts', options.out, cases.results())}")


if __name__ == "__main__":
    main()
