"""How long does an all_reduce take on one shared GPU, with each backend, compared with a copy?

usage: python benchmarks/gpu_all_reduce.py [--ranks 2 4 8] [--backends ...] [--dtype bfloat16] [--operations all_gather ...]
       [--mps] [--budget-s 270] [--dry] [--out FOLDER]

Backends: ``ipc`` (device memory, the first rank reduces), ``ipc_one_pass``
(each rank reduces everything), ``ipc_4_mib`` (as ``ipc`` in chunks of 4 MiB), ``staged`` (pinned host memory over
shared host memory), ``staged_gloo`` (the same over Gloo), ``gloo``, ``nccl`` (2.30 or newer, with its multi-rank
flags), ``nccl_hostid`` (every rank claims to be on its own host; for the record), and ``copy``, a device-to-device copy
of the tensor by all ranks at the same time. Medians of calls that start after a barrier and end when the last rank has
finished; ``in_a_row_ms`` is the time of one of several consecutive calls. The size is that of an all_reduce's tensor,
of an all_gather's output and of a reduce_scatter's input.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import parser, save
from gpu_ranks import Cases, Rank, add_options, in_rank

SIZES = (4 << 10, 64 << 10, 1 << 20, 25 << 20, 256 << 20)
# The most important cases come first, because the budget may end before the last one.
BACKENDS = (
    "copy",
    "ipc",
    "gloo",
    "staged",
    "ipc_one_pass",
    "ipc_4_mib",
    "staged_gloo",
    "nccl",
    "nccl_hostid",
)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
_CALLS_S = 0.25
_MAX_IN_A_ROW = 10


def call_of(rank: Rank, operation: str, numel: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return the call to be measured, on zeros, which stay zeros; its result was checked with other numbers.

    Raises:
        RuntimeError: The result is wrong.
    """
    part = numel // rank.num_ranks
    rank_sum = rank.num_ranks * (rank.num_ranks + 1) / 2
    whole = torch.full((part * rank.num_ranks,), rank.rank + 1.0, dtype=dtype, device=rank.device)
    own = torch.full((part,), rank.rank + 1.0, dtype=dtype, device=rank.device)
    if rank.spec["backend"] == "copy":
        target = torch.empty_like(whole)
        return lambda: target.copy_(whole)
    if operation == "all_reduce":
        call, result, expected = (lambda: dist.all_reduce(whole)), whole, [rank_sum] * rank.num_ranks
    elif operation == "all_gather":
        call, result = (lambda: dist.all_gather_into_tensor(whole, own)), whole
        expected = [other + 1.0 for other in range(rank.num_ranks)]
    else:
        call, result, expected = (lambda: dist.reduce_scatter_tensor(own, whole)), own, [rank_sum]
    call()
    rows = result.view(len(expected), part)
    if not all(bool((row == value).all()) for row, value in zip(rows, expected, strict=True)):
        raise RuntimeError(f"Error: {operation} of {numel} elements is wrong on rank {rank.rank}")
    whole.zero_()
    own.zero_()
    return call


def measure(rank: Rank) -> None:
    """Measure every operation and size in turn."""
    dtype = getattr(torch, rank.spec["dtype"])
    for operation in rank.spec["operations"]:
        for num_bytes in rank.spec["sizes"]:
            call = call_of(rank, operation, num_bytes // dtype.itemsize, dtype)
            seconds = rank.time_calls(call, _CALLS_S)
            p25, median, p75 = statistics.quantiles(seconds, n=4)

            # The seconds are equal on all ranks, and so is this number.
            count = max(2, min(_MAX_IN_A_ROW, int(_CALLS_S / median)))

            def in_a_row(call: Callable[[], object] = call, count: int = count) -> None:
                for _ in range(count):
                    call()

            rank.tell(
                {
                    "operation": operation,
                    "dtype": rank.spec["dtype"],
                    "num_bytes": num_bytes,
                    "num_calls": len(seconds),
                    "median_ms": round(median * 1e3, 5),
                    "p25_ms": round(p25 * 1e3, 5),
                    "p75_ms": round(p75 * 1e3, 5),
                    "in_a_row_ms": round(rank.once(in_a_row) / count * 1e3, 5),
                }
            )


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    options.add_argument("--operations", nargs="+", default=["all_reduce"], choices=OPERATIONS)
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="in bytes")
    add_options(options, 270)
    arguments = options.parse_args()
    spec = {
        "sizes": arguments.sizes[:2] if arguments.dry else arguments.sizes,
        "operations": arguments.operations,
        "dtype": arguments.dtype,
    }
    all_ranks = arguments.ranks[:1] if arguments.dry else arguments.ranks
    cases = Cases(__file__, arguments)
    with cases.running():
        for num_ranks in all_ranks:
            for backend in arguments.backends:
                cases.run(backend, num_ranks, **spec)
    print(save("gpu_all_reduce", arguments.out, cases.results()))


if __name__ == "__main__" and not in_rank(measure):
    main()
