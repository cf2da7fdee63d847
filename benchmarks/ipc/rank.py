"""One rank of the benchmark: time every case and print it. Run by `ranks` as a program; never Ray."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)
from benchmarks.ipc import COLD
from benchmarks.ipc.load import busy_s
from ray_fracbackend.worker.group_end import destroy_process_groups

# Calls of one size in one round: many for small sizes, few for sizes that take long.
_BYTES_PER_ROUND = 400 << 20
_MIN_BLOCKS = 4
_WARM_UP_CALLS = 2
# Calls that follow each other without a barrier and are timed as one block, and the most blocks of a round.
_BLOCKS = {"ddp_step": (4, 10), "fsdp_step": (4, 10), COLD: (20, 5)}
_SINGLE_CALLS = (1, 100)
# Width, layers and batch size by bytes of the parameters; other sizes have 4 layers and batch size 4.
_MODELS = {3 << 20: (256, 12, 8), 32 << 20: (1024, 8, 8)}
# Up to this share of all cores used by other processes a measurement counts as undisturbed.
_QUIET_SHARE = 0.1
_PAUSE_S = 0.5
_TIMEOUT = timedelta(seconds=300)
_NCCL_TIMEOUT = timedelta(seconds=60)


def _blocks(operation: str, num_bytes: int) -> tuple[int, int]:
    """Return the number of blocks in a round and of calls in a block."""
    num_calls, most = _BLOCKS.get(operation, _SINGLE_CALLS)
    return max(_MIN_BLOCKS, min(most, _BYTES_PER_ROUND // num_bytes // 4 // num_calls)), num_calls


@dataclass(frozen=True)
class _Backends:
    """What a rank can measure: groups by backend, mpi4py and DeepSpeed's all_reduce if they are there.

    A step with a group of `without_exchange` has no communication: DDP in a group of one, FSDP2 in a fake group.
    """

    groups: dict[str, Any]
    without_exchange: dict[str, Any]
    mpi: Any
    deepspeed: Any
    device: torch.device


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


def _step(operation: str, num_bytes: int, group: Any, device: torch.device, copies: bool = False) -> Callable[[], None]:
    """Return a training step of linear layers with DDP or FSDP2."""
    width, num_layers, batch_size = _MODELS.get(num_bytes, (max(8, math.isqrt(num_bytes // 16)), 4, 4))
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers))).to(device)
    if operation == "ddp_step":
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
        if copies:
            pieces = [torch.zeros(1 << 18) for _ in range(8)]
            model.register_comm_hook(pieces, lambda state, bucket: _copies(state, bucket))  # torch compares annotations
    else:
        from torch.distributed.fsdp import fully_shard  # late, because it takes a second

        mesh = DeviceMesh.from_group(group, device.type)
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(batch_size, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _copies(pieces: list[torch.Tensor], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Move the bytes of a copying all_reduce of two ranks in this process's own memory; a communication hook of DDP."""
    for index, part in enumerate(bucket.buffer().split(pieces[0].numel())):
        slot, other = (piece[: part.numel()] for piece in (pieces[index % 4], pieces[4 + index % 4]))
        slot.copy_(part)
        torch.add(part, other, out=part)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _cold_calls(num_bytes: int, backends: _Backends) -> dict[str, Callable[[], Any]]:
    """Return functions that compute and then call all_reduce, by backend; "none" only computes."""
    tensor = torch.zeros(num_bytes // 4, device=backends.device)
    matrix, large = (torch.zeros(shape, device=backends.device) for shape in ((160, 160), (1 << 20,)))
    calls: dict[str, Callable[[], Any]] = {"none": lambda: None}
    for name, group in backends.groups.items():
        calls[name] = partial(dist.all_reduce, tensor, group=group)
        calls[f"{name}_async"] = lambda group=group: dist.all_reduce(tensor, group=group, async_op=True).wait()
    if backends.deepspeed is not None:
        calls["deepspeed"] = partial(backends.deepspeed, tensor)

    def compute_and(call: Callable[[], Any]) -> None:
        for _ in range(4):
            (matrix @ matrix).clamp_(-1, 1)
        large.add_(1)
        call()

    return {name: partial(compute_and, call) for name, call in calls.items()}


def _subjects(operation: str, num_bytes: int, backends: _Backends) -> dict[str, Callable[[], Any]]:
    """Return the functions to time, by backend.

    "copy" is a plain copy of the tensor. "none" has no communication, and "copies" only its copies and additions.
    """
    groups, device = backends.groups, backends.device
    if operation == COLD:
        subjects = _cold_calls(num_bytes, backends)
    elif operation in backends.without_exchange:
        of_step = {**groups, "none": backends.without_exchange[operation]}
        subjects = {name: _step(operation, num_bytes, group, device) for name, group in of_step.items()}
        if operation == "ddp_step" and device.type == "cpu":
            subjects["copies"] = _step(operation, num_bytes, of_step["none"], device, copies=True)
    else:
        subjects = {name: _collective(operation, num_bytes, group, device) for name, group in groups.items()}
        source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
        subjects["copy"] = lambda: target.copy_(source)
        if backends.mpi is not None:
            subjects["open_mpi"] = _open_mpi(operation, num_bytes, backends.mpi)
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


def _without_exchange() -> dict[str, Any]:
    """Create the groups without communication, by step."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    return {"ddp_step": dist.new_subgroups(1, backend="gloo")[0], "fsdp_step": dist.new_group(backend="fake")}


def _deepspeed(port: int) -> Callable[[torch.Tensor], Any]:
    """Return DeepSpeed's all_reduce in shared memory."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    dist.barrier()
    # DeepSpeed leaves its files, which all ranks have mapped now.
    if rank == "0":
        for path in Path("/dev/shm").glob(f"deepspeed_*_127.0.0.1_{port}_*"):
            path.unlink()
    return deepspeed.comm.inference_all_reduce


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


def _time_calls(subject: Callable[[], Any], num_blocks: int, num_calls: int) -> torch.Tensor:
    """Return the seconds of a call on the slowest rank, for each block of calls after a barrier."""
    seconds = torch.empty(num_blocks, dtype=torch.float64)
    for _ in range(_WARM_UP_CALLS):
        subject()
    for block in range(num_blocks):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            subject()
        seconds[block] = (time.perf_counter() - start) / num_calls
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds


def _time_case(
    subjects: dict[str, Callable[[], Any]], num_blocks: int, num_calls: int, loops: list[int]
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of a call in each block by backend, and the machine's share used by others than ranks and loops."""
    wall, busy, own = time.monotonic(), busy_s(loops), time.process_time()
    timed = {backend: _time_calls(subject, num_blocks, num_calls).tolist() for backend, subject in subjects.items()}
    wall, busy, own = time.monotonic() - wall, busy_s(loops) - busy, time.process_time() - own
    total_own = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total_own)
    share = torch.tensor(max(0.0, busy - total_own.item()) / (wall * (os.cpu_count() or 1)), dtype=torch.float64)
    # Rank 0's value, so that all ranks make the same decision.
    dist.broadcast(share, 0)
    return timed, share.item()


def _time_quietly(
    subjects: dict[str, Callable[[], Any]], num_blocks: int, num_calls: int, tries: int, loops: list[int]
) -> tuple[dict[str, list[float]], float]:
    """Return the first of up to `tries` measurements on a quiet machine, or the one with the least load."""
    best = _time_case(subjects, num_blocks, num_calls, loops)
    for _ in range(tries - 1):
        if best[1] <= _QUIET_SHARE:
            break
        time.sleep(_PAUSE_S)
        again = _time_case(subjects, num_blocks, num_calls, loops)
        if again[1] < best[1]:
            best = again
    return best


def _measure(spec: dict[str, Any], mpi: Any) -> Iterator[dict[str, Any]]:
    """Yield progress messages, then one with all measurements."""
    device = _device(spec["device"])
    deepspeed = _deepspeed(spec["port"]) if spec["deepspeed"] else None
    backends = _Backends(_groups(spec["nccl"], device), _without_exchange(), mpi, deepspeed, device)
    cases = spec["cases"]
    seconds: dict[tuple[str, int, str], list[float]] = {}
    shares: dict[tuple[str, int], float] = {}
    total = spec["rounds"] * len(cases)
    for turn in range(spec["rounds"]):
        for number, (operation, num_bytes) in enumerate(cases):
            subjects = _subjects(operation, num_bytes, backends)
            timed, share = _time_quietly(subjects, *_blocks(operation, num_bytes), spec["tries"], spec["loops"])
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
