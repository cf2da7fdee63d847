"""Where does the time of a small all_reduce of two ranks go?

usage: python benchmarks/small_call.py [--rounds 40] [--calls 200] [--bytes 4096] [--out FOLDER]

In each round every case is timed in turn, so a slow moment of the machine affects all of them. Microseconds on rank 0,
medians of the rounds:

``ipc``           ``all_reduce``, one directly after the other; needs two free cores
``call layer``    the same call to a Python process group that does nothing: torch.distributed's wrapper and dispatch
``two copies``    the necessary work on the tensors: a copy into the slot and a copy out of it
``ctypes call``   a call of an almost empty C function: the cost of calling compiled code
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import parser, save

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)


class NoWork(dist.Work):
    """A completed Work."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class NoGroup(dist.ProcessGroup):
    """A process group whose all_reduce does nothing."""

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return NoWork()


def cases(num_bytes: int) -> dict[str, Callable[[], Any]]:
    """Return the timed functions by name."""
    dist.Backend.register_backend("none", lambda store, rank, size, timeout: NoGroup(rank, size), devices=["cpu"])
    none = dist.new_group(backend="none")
    tensor, slot = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    getppid = ctypes.CDLL(None).getppid

    def two_copies() -> None:
        slot.copy_(tensor)
        tensor.copy_(slot)

    return {
        "ipc": lambda: dist.all_reduce(tensor),
        "call layer": lambda: dist.all_reduce(tensor, group=none),
        "two copies": two_copies,
        "ctypes call": getppid,
    }


def microseconds(case: Callable[[], Any], calls: int) -> float:
    """Return the microseconds of one call."""
    started = time.perf_counter()
    for _ in range(calls):
        case()
    return (time.perf_counter() - started) / calls * 1e6


def measure(
    rank: int, port: int, num_bytes: int, rounds: int, calls: int, store: dist.TCPStore | None = None
) -> dict[str, list[float]]:
    """Run one rank and return the microseconds of one call by case, for each round."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("ipc", store=store or dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2)
    found: dict[str, list[float]] = {}
    timed = cases(num_bytes)
    for _ in range(rounds + 1):
        for name, case in timed.items():
            dist.barrier()
            found.setdefault(name, []).append(microseconds(case, calls))
    dist.destroy_process_group()
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--calls", type=int, default=200, help="of a case in one round")
    options.add_argument("--bytes", type=int, default=4096, help="of the float32 tensor")
    chosen = options.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, chosen.bytes, chosen.rounds, chosen.calls)
    other = mp.get_context("spawn").Process(target=measure, args=(1, *arguments), daemon=True)
    other.start()
    found = measure(0, *arguments, store)
    other.join()
    rows = [
        # The first round warms up.
        {"case": name, "median_us": statistics.median(values[1:]), "all_us": values[1:]}
        for name, values in found.items()
    ]
    for row in rows:
        print(f"{row['case']:<14}{row['median_us']:>8.1f} µs")
    settings = {"rounds": chosen.rounds, "calls": chosen.calls, "num_bytes": chosen.bytes}
    print(f"written to {save('small_call', chosen.out, {'settings': settings, 'rows': rows})}")


if __name__ == "__main__":
    main()
