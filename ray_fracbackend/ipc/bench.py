"""Measures collectives and DDP steps of the ipc backend beside Gloo, a plain copy and, under mpirun, Open MPI.

`run_benchmark` starts the ranks and returns rows; the ranks run this module as a script. Everything of one run is
measured in the same processes, backend after backend in every round, so that a slow moment of the machine meets all.
Runs in the caller's process (no process group needed there) and in the ranks; imports torch, never Ray.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ray_fracbackend.ipc  # noqa: F401 (as a script this module has to register the backend itself)
from ray_fracbackend.ipc.torch_compat import TCPStore

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "ddp_step")
BACKENDS = ("ipc", "gloo", "copy", "open_mpi")
SIZES = (4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)
# Calls of one size in one round: many for small ones, few for those that take long anyway.
_BYTES_PER_ROUND = 400 << 20
_MIN_CALLS, _MAX_CALLS = 4, 100
_WARM_UP_CALLS = 2
# Up to this share of all cores used by other processes a measurement counts as undisturbed.
_QUIET_SHARE = 0.1
_PAUSE_S = 0.5
_TIMEOUT = timedelta(seconds=300)

Row = dict[str, Any]


def run_benchmark(
    num_ranks: int,
    *,
    operations: Sequence[str] = OPERATIONS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    tries: int = 1,
    mpirun: Sequence[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Row]:
    """Measure on this machine.

    Args:
        num_ranks: Processes to start.
        operations: Of `OPERATIONS`.
        sizes: Bytes of the float32 tensor: of all_gather the output, of reduce_scatter the input, of ddp_step the
            parameters.
        rounds: How often everything is measured; medians are over all rounds.
        tries: How often a case of a round is repeated while other processes use over a tenth of the machine. The
            quietest try counts, whatever its times are.
        mpirun: Command that starts `num_ranks` processes under Open MPI, such as ``["mpirun", "-n", "2"]``; the ranks
            need mpi4py. None starts them directly and leaves Open MPI out.
        progress: Called as ``progress(done, total, what)``.

    Returns:
        One row for each operation, size and backend: ``operation``, ``num_bytes``, ``backend``, ``num_ranks``,
        ``num_calls``, the ``median_ms``, ``p25_ms`` and ``p75_ms`` of the calls, and ``others``, the largest share of
        the machine that other processes took in a round. A call begins after a barrier and ends when its last rank is
        through.

    Raises:
        RuntimeError: A rank failed; the message has its output.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spec = {
        "size": num_ranks,
        "port": store.port,
        "operations": operations,
        "sizes": sizes,
        "rounds": rounds,
        "tries": tries,
    }
    command = [sys.executable, "-m", "ray_fracbackend.ipc.bench", json.dumps({**spec, "mpi": mpirun is not None})]
    # mpirun starts all ranks and tells each its number itself.
    commands = [command] * num_ranks if mpirun is None else [[*mpirun, *command]]
    ranks = [
        subprocess.Popen(
            line,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, line in enumerate(commands)
    ]
    rows, other = _read(ranks[0], progress)
    for process in ranks:
        rest, _ = process.communicate()
        if process.returncode:
            output = (other + rest)[-4000:]
            raise RuntimeError(f"A rank of the benchmark ended with code {process.returncode}: {output}")
    return rows


def _read(process: subprocess.Popen[str], progress: Callable[[int, int, str], None] | None) -> tuple[list[Row], str]:
    """Rows from rank 0's messages, and whatever else it printed."""
    rows: list[Row] = []
    other = ""
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            other += line
            continue
        message = json.loads(line)
        rows += message.get("rows", [])
        if progress is not None and "done" in message:
            progress(message["done"], message["total"], message["what"])
    return rows, other


def _calls(num_bytes: int) -> int:
    return max(_MIN_CALLS, min(_MAX_CALLS, _BYTES_PER_ROUND // num_bytes // 4))


def _collective(operation: str, num_bytes: int, group: Any) -> Callable[[], Any]:
    """A function that runs the operation once on tensors of its own."""
    size = dist.get_world_size()
    whole = torch.ones(num_bytes // 4 // size * size)
    part = torch.ones(whole.numel() // size)
    if operation == "all_reduce":
        # Zeros stay zeros however often they are summed.
        whole.zero_()
        return lambda: dist.all_reduce(whole, group=group)
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    parts = list(whole.chunk(size))
    if operation == "all_gather":
        return lambda: dist.all_gather(parts, part, group=group)
    return lambda: dist.reduce_scatter(part, parts, group=group)


def _open_mpi(operation: str, num_bytes: int, mpi: Any) -> Callable[[], Any]:
    """The same through mpi4py, on memory of torch tensors as well."""
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


def _ddp_step(num_bytes: int, group: Any) -> Callable[[], Any]:
    """One forward and backward of a linear model under DDP, or of the bare model if there is no group."""
    width = max(8, int((num_bytes / 4 / 4) ** 0.5))
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))
    if group is not None:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    batch = torch.ones(4, width)

    def step() -> None:
        model(batch).sum().backward()

    return step


def _subjects(operation: str, num_bytes: int, gloo: Any, mpi: Any) -> dict[str, Callable[[], Any]]:
    """What to time side by side, by backend; "copy" is a plain copy of the tensor, or a step without communication."""
    world = dist.group.WORLD
    if operation == "ddp_step":
        return {name: _ddp_step(num_bytes, group) for name, group in (("ipc", world), ("gloo", gloo), ("copy", None))}
    subjects = {name: _collective(operation, num_bytes, group) for name, group in (("ipc", world), ("gloo", gloo))}
    source, target = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    subjects["copy"] = lambda: target.copy_(source)
    if mpi is not None:
        subjects["open_mpi"] = _open_mpi(operation, num_bytes, mpi)
    return subjects


def _time_calls(subject: Callable[[], Any], num_calls: int) -> torch.Tensor:
    """Seconds of each call on the rank that took longest."""
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


def _busy_s() -> float:
    """CPU seconds that all processes of the machine have used since boot."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _time_case(subjects: dict[str, Callable[[], Any]], num_calls: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of all calls by backend, and the share of the machine that other processes took meanwhile."""
    wall, busy, own = time.monotonic(), _busy_s(), time.process_time()
    timed = {backend: _time_calls(subject, num_calls).tolist() for backend, subject in subjects.items()}
    wall, busy, own = time.monotonic() - wall, _busy_s() - busy, time.process_time() - own
    total_own = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total_own)
    share = torch.tensor(max(0.0, busy - total_own.item()) / (wall * (os.cpu_count() or 1)), dtype=torch.float64)
    # Rank 0's figure, so that all ranks come to the same decision.
    dist.broadcast(share, 0)
    return timed, share.item()


def _time_quietly(
    subjects: dict[str, Callable[[], Any]], num_calls: int, tries: int
) -> tuple[dict[str, list[float]], float]:
    """The first of up to `tries` measurements during which the machine was quiet, or the quietest of them."""
    best = _time_case(subjects, num_calls)
    for _ in range(tries - 1):
        if best[1] <= _QUIET_SHARE:
            break
        time.sleep(_PAUSE_S)
        again = _time_case(subjects, num_calls)
        if again[1] < best[1]:
            best = again
    return best


def _measure(spec: dict[str, Any], mpi: Any) -> Iterator[dict[str, Any]]:
    """Progress messages, then one with all rows."""
    gloo = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    cases = [(operation, size) for operation in spec["operations"] for size in spec["sizes"]]
    seconds: dict[tuple[str, int, str], list[float]] = {}
    shares: dict[tuple[str, int], float] = {}
    total = spec["rounds"] * len(cases)
    for turn in range(spec["rounds"]):
        for number, (operation, num_bytes) in enumerate(cases):
            subjects = _subjects(operation, num_bytes, gloo, mpi)
            timed, share = _time_quietly(subjects, _calls(num_bytes), spec["tries"])
            shares[operation, num_bytes] = max(share, shares.get((operation, num_bytes), 0.0))
            for backend, values in timed.items():
                seconds.setdefault((operation, num_bytes, backend), []).extend(values)
            yield {"done": turn * len(cases) + number + 1, "total": total, "what": f"{operation} {num_bytes}"}
    yield {
        "rows": [
            {
                **_row(operation, num_bytes, backend, spec["size"], values),
                "others": round(shares[operation, num_bytes], 2),
            }
            for (operation, num_bytes, backend), values in seconds.items()
        ]
    }


def _row(operation: str, num_bytes: int, backend: str, num_ranks: int, seconds: list[float]) -> Row:
    p25, median, p75 = (quantile * 1e3 for quantile in statistics.quantiles(seconds, n=4))
    return {
        "operation": operation,
        "num_bytes": num_bytes,
        "backend": backend,
        "num_ranks": num_ranks,
        "num_calls": len(seconds),
        "median_ms": round(median, 5),
        "p25_ms": round(p25, 5),
        "p75_ms": round(p75, 5),
    }


def _rank_main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    mpi = None
    if spec["mpi"]:
        mpi = importlib.import_module("mpi4py.MPI")
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    store = TCPStore("127.0.0.1", spec["port"], is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("ipc", store=store, rank=rank, world_size=spec["size"], timeout=_TIMEOUT)
    for message in _measure(spec, mpi):
        if rank == 0:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank_main(json.loads(sys.argv[1]))
