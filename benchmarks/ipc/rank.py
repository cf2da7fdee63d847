"""One rank of the benchmark: time every case and print it. Run by `ranks` as a program; never Ray."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)
from benchmarks.ipc.load import busy_s
from ray_fracbackend.worker.group_end import destroy_process_groups

# Calls of one size in one round: many for small sizes, few for sizes that take long.
_BYTES_PER_ROUND = 400 << 20
_MIN_CALLS, _MAX_CALLS = 4, 100
_WARM_UP_CALLS = 2
# Up to this share of all cores used by other processes a measurement counts as undisturbed.
_QUIET_SHARE = 0.1
_PAUSE_S = 0.5
_TIMEOUT = timedelta(seconds=300)
_NCCL_TIMEOUT = timedelta(seconds=60)


def _calls(num_bytes: int) -> int:
    return max(_MIN_CALLS, min(_MAX_CALLS, _BYTES_PER_ROUND // num_bytes // 4))


def _collective(operation: str, num_bytes: int, group: Any, device: torch.device) -> Callable[[], Any]:
    """Return a function that runs the operation once on its own tensors."""
    size = dist.get_world_size()
    whole = torch.ones(num_bytes // 4 // size * size, device=device)
    part = torch.ones(whole.numel() // size, device=device)
    if operation == "all_reduce":
        # Zeros stay zeros, however often they are summed.
        whole.zero_()
        return lambda: dist.all_reduce(whole, group=group)
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    parts = list(whole.chunk(size))
    if operation == "all_gather":
        return lambda: dist.all_gather(parts, part, group=group)
    return lambda: dist.reduce_scatter(part, parts, group=group)


def _open_mpi(operation: str, num_bytes: int, mpi: Any) -> Callable[[], Any]:
    """Return the same function with mpi4py, also on memory of torch tensors."""
    comm = mpi.COMM_WORLD
    size = comm.Get_size()
    whole = torch.zeros(num_bytes // 4 // size * size).numpy()
    part = torch.zeros(len(whole) // size).numpy()
    return {
        "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, whole),
        "broadcast": lambda: comm.Bcast(whole, 0),
        "all_gather": lambda: comm.Allgather(part, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
    }[operation]


def _ddp_step(num_bytes: int, group: Any, device: torch.device) -> Callable[[], Any]:
    """Return a forward and backward of a linear model with DDP, or of the model itself if there is no group."""
    width = max(8, int((num_bytes / 4 / 4) ** 0.5))
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4))).to(
        device
    )
    if group is not None:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    batch = torch.ones(4, width, device=device)

    def step() -> None:
        model(batch).sum().backward()

    return step


def _subjects(
    operation: str, num_bytes: int, groups: dict[str, Any], mpi: Any, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Return the functions to time, by backend; "copy" is a plain copy of the tensor, or a step without DDP."""
    if operation == "ddp_step":
        subjects = {name: _ddp_step(num_bytes, group, device) for name, group in {**groups, "copy": None}.items()}
    else:
        subjects = {name: _collective(operation, num_bytes, group, device) for name, group in groups.items()}
        source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
        subjects["copy"] = lambda: target.copy_(source)
        if mpi is not None:
            subjects["open_mpi"] = _open_mpi(operation, num_bytes, mpi)
    return {name: _until_done(subject, device) for name, subject in subjects.items()}


def _until_done(subject: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Make a call on a CUDA device return only after its work is done."""
    if device.type == "cpu":
        return subject

    def call() -> None:
        subject()
        torch.cuda.synchronize(device)

    return call


def _groups(nccl: bool, device: torch.device) -> dict[str, Any]:
    """Create the groups to measure, by backend. NCCL is left out if it does not accept these ranks."""
    groups = {"ipc": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=_TIMEOUT)}
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))  # sets up device memory
        reason = groups["ipc"].staged_reason
        if reason is not None:
            # Without device memory ipc stages tensors, so its rows would be those of the staged backend.
            raise RuntimeError(f"the ipc backend cannot use the memory of {device}: {reason}")
    if nccl and _works_everywhere(group := dist.new_group(backend="nccl", timeout=_NCCL_TIMEOUT), device):
        groups["nccl"] = group
    return groups


def _works_everywhere(group: Any, device: torch.device) -> bool:
    """Return whether an all_reduce in the group succeeds on every rank; the result is the same on all ranks."""
    works = torch.ones(1)
    try:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        works.zero_()
        sys.stderr.write(f"left out of the benchmark: {error}\n")
    dist.all_reduce(works, dist.ReduceOp.MIN)
    return bool(works.item())


def _time_calls(subject: Callable[[], Any], num_calls: int) -> torch.Tensor:
    """Return the seconds of each call on the slowest rank."""
    seconds = torch.empty(num_calls, dtype=torch.float64)
    for _ in range(_WARM_UP_CALLS):
        subject()
    for call in range(num_calls):
        dist.barrier()
        start = time.perf_counter()
        subject()
        seconds[call] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds


def _time_case(
    subjects: dict[str, Callable[[], Any]], num_calls: int, loops: list[int]
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of all calls by backend, and the machine's share used by others than ranks and loops."""
    wall, busy, own = time.monotonic(), busy_s(loops), time.process_time()
    timed = {backend: _time_calls(subject, num_calls).tolist() for backend, subject in subjects.items()}
    wall, busy, own = time.monotonic() - wall, busy_s(loops) - busy, time.process_time() - own
    total_own = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total_own)
    share = torch.tensor(max(0.0, busy - total_own.item()) / (wall * (os.cpu_count() or 1)), dtype=torch.float64)
    # Rank 0's value, so that all ranks make the same decision.
    dist.broadcast(share, 0)
    return timed, share.item()


def _time_quietly(
    subjects: dict[str, Callable[[], Any]], num_calls: int, tries: int, loops: list[int]
) -> tuple[dict[str, list[float]], float]:
    """Return the first of up to `tries` measurements on a quiet machine, or the one with the least load."""
    best = _time_case(subjects, num_calls, loops)
    for _ in range(tries - 1):
        if best[1] <= _QUIET_SHARE:
            break
        time.sleep(_PAUSE_S)
        again = _time_case(subjects, num_calls, loops)
        if again[1] < best[1]:
            best = again
    return best


def _measure(spec: dict[str, Any], mpi: Any) -> Iterator[dict[str, Any]]:
    """Yield progress messages, then one with all measurements."""
    device = _device(spec["device"])
    groups = _groups(spec["nccl"], device)
    cases = [(operation, size) for operation in spec["operations"] for size in spec["sizes"]]
    seconds: dict[tuple[str, int, str], list[float]] = {}
    shares: dict[tuple[str, int], float] = {}
    total = spec["rounds"] * len(cases)
    for turn in range(spec["rounds"]):
        for number, (operation, num_bytes) in enumerate(cases):
            subjects = _subjects(operation, num_bytes, groups, mpi, device)
            timed, share = _time_quietly(subjects, _calls(num_bytes), spec["tries"], spec["loops"])
            shares[operation, num_bytes] = max(share, shares.get((operation, num_bytes), 0.0))
            for backend, values in timed.items():
                seconds.setdefault((operation, num_bytes, backend), []).extend(values)
            yield {"done": turn * len(cases) + number + 1, "total": total, "what": f"{operation} {num_bytes}"}
    yield {
        "measured": [
            (operation, num_bytes, backend, values, shares[operation, num_bytes])
            for (operation, num_bytes, backend), values in seconds.items()
        ]
    }


def _device(kind: str) -> torch.device:
    """Return the device of this rank and make it the current device."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, 0)
    torch.cuda.set_device(device)
    return device


def _end_with_parent() -> None:
    """End this process when standard input ends: the other end belongs to the driver, which may be killed."""
    os.read(0, 1)
    os._exit(1)


def _rank_main(spec: dict[str, Any]) -> None:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    # mpirun passes its standard input to rank 0, and ends the other ranks with rank 0.
    if rank == 0 or not spec["mpi"]:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    mpi = None
    if spec["mpi"]:
        mpi = importlib.import_module("mpi4py.MPI")
    store = TCPStore("127.0.0.1", spec["port"], is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("ipc", store=store, rank=rank, world_size=spec["size"], timeout=_TIMEOUT)
    for message in _measure(spec, mpi):
        if rank == 0:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
    dist.barrier()
    destroy_process_groups()


if __name__ == "__main__":
    _rank_main(json.loads(sys.argv[1]))
