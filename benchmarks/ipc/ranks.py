"""Measure collectives, training steps and cold calls of the ipc backend beside other backends and without communication.

Starts the ranks, which run `rank`, and collects their rows. All cases of one run are measured in the same processes,
one backend after the other in every round, so a slow moment of the machine affects all of them. Needs no process group
in the caller's process; imports torch, never Ray.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.ipc import OPERATIONS, SIZES
from benchmarks.ipc.load import busy_loops

# Folder that contains `benchmarks`.
_ROOT = Path(__file__).parents[2]
# Seconds between asking a process to end and killing it.
_END_S = 5.0

Row = dict[str, Any]
# Operation, bytes, backend.
Case = tuple[str, int, str]


def run_benchmark(
    num_ranks: int,
    *,
    operations: Sequence[str] = OPERATIONS,
    sizes: Sequence[int] | None = None,
    rounds: int = 5,
    starts: int = 1,
    tries: int = 1,
    device: str = "cpu",
    busy: int = 0,
    nccl_env: Mapping[str, str] | None = None,
    mpirun: Sequence[str] | None = None,
    deepspeed: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Row]:
    """Run the benchmark on this machine.

    Args:
        num_ranks: Number of processes.
        operations: Names from `OPERATIONS`.
        sizes: Bytes of the float32 tensor: for all_gather of the output, for reduce_scatter of the input, for a step
            of the parameters. None means those of `SIZES`.
        rounds: Number of repetitions in the same processes; medians are over all rounds of all starts.
        starts: Number of times that the processes are started. The places of processes and memory differ between
            starts.
        tries: Maximum number of tries of a case in a round while other processes use more than a tenth of the machine.
            The try with the least load counts, whatever its times are.
        device: Device of the tensors: ``"cpu"``, or ``"cuda"`` for the first device that torch sees, which all ranks
            share.
        busy: Number of endless loops that run beside the ranks, each in its own process.
        nccl_env: Variables with which NCCL accepts the ranks, for ``"cuda"``; None leaves NCCL out.
        mpirun: Command that starts `num_ranks` processes under Open MPI, such as ``["mpirun", "-n", "2"]``; the ranks
            need mpi4py. None starts them directly and leaves Open MPI out.
        deepspeed: Whether cold calls also run DeepSpeed's all_reduce in shared memory.
        progress: Called as ``progress(done, total, what)``.

    Returns:
        One row for each operation, size and backend: ``operation``, ``num_bytes``, ``backend``, ``num_ranks``,
        ``busy``, ``num_calls``; ``median_ms``, ``p25_ms`` and ``p75_ms`` of the calls; ``start_medians_ms``, the median
        of each start; and ``others``, the largest share of the machine that other processes used in a round. A call
        starts after a barrier and ends when its last rank has finished, including its work on the device. Steps and
        cold calls run in blocks after a barrier, and a block counts as one call of its mean time. Backend ``"none"``
        is the same step or computing without communication.

    Raises:
        RuntimeError: A rank failed, or the ipc backend cannot use the device's memory; the message contains its output.
    """
    spec = {
        "size": num_ranks,
        "cases": [(operation, size) for operation in operations for size in sizes or SIZES[operation]],
        "rounds": rounds,
        "tries": tries,
        "device": device,
        "nccl": nccl_env is not None,
        "mpi": mpirun is not None,
        "deepspeed": deepspeed,
    }
    seconds: dict[Case, list[list[float]]] = {}
    others: dict[Case, float] = {}
    for start in range(starts):

        def report(done: int, total: int, what: str, start: int = start) -> None:
            if progress is not None:
                progress(start * total + done, starts * total, what)

        with busy_loops(busy) as loops:
            measured = _start_ranks({**spec, "loops": loops}, nccl_env or {}, mpirun, report)
        for operation, num_bytes, backend, values, share in measured:
            case = (operation, num_bytes, backend)
            seconds.setdefault(case, []).append(values)
            others[case] = max(share, others.get(case, 0.0))
    return [_row(case, num_ranks, busy, by_start, others[case]) for case, by_start in seconds.items()]


def _start_ranks(
    spec: Mapping[str, Any],
    env: Mapping[str, str],
    mpirun: Sequence[str] | None,
    progress: Callable[[int, int, str], None],
) -> list[Any]:
    """Return operation, bytes, backend, seconds of the calls and share of other processes for each case."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    argument = json.dumps({**spec, "port": store.port})
    command = [sys.executable, "-m", "benchmarks.ipc.rank", argument]
    # mpirun starts and numbers all ranks itself.
    commands = [command] * spec["size"] if mpirun is None else [[*mpirun, *command]]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank, line in enumerate(commands):
            # torch 2.15 makes an NCCL group on the device with the number LOCAL_RANK.
            variables = {**os.environ, **env, "RANK": str(rank), "LOCAL_RANK": "0"}
            variables |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            # The pipe to its standard input ends with this process in any case, and the rank ends with the pipe.
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen(line, env=variables, cwd=_ROOT, text=True, **pipes))
        return _measured(ranks, progress)
    finally:
        _end(ranks)
        for process in ranks:
            process.communicate()


def _measured(ranks: list[subprocess.Popen[str]], progress: Callable[[int, int, str], None]) -> list[Any]:
    """Return the measurements of rank 0; a rank that fails ends the others, which would wait for it."""
    measured: list[Any] = []
    failed = ""
    # One thread for each rank, because a full pipe would stop a rank.
    with ThreadPoolExecutor(len(ranks)) as pool:
        try:  # also for the threads: while one reads, the pool waits for the end of its rank
            outputs = {
                pool.submit(_read, process, measured if rank == 0 else [], progress): process
                for rank, process in enumerate(ranks)
            }
            for output in as_completed(outputs):
                code = outputs[output].wait()
                if code and not failed:
                    failed = f"a rank of the benchmark ended with exit code {code}: {output.result()[-4000:]}"
                    _end(ranks)
        except BaseException:
            _end(ranks)
            raise
    if failed:
        raise RuntimeError(failed)
    return measured


def _end(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for process in ranks:
        process.terminate()  # mpirun passes it on
    for process in ranks:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _read(process: subprocess.Popen[str], measured: list[Any], progress: Callable[[int, int, str], None]) -> str:
    """Read a rank's output to its end: append measurements to the list, and return all other output."""
    other = ""
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            other += line
            continue
        message = json.loads(line)
        measured += message.get("measured", [])
        if "done" in message:
            progress(message["done"], message["total"], message["what"])
    return other


def _row(case: Case, num_ranks: int, busy: int, by_start: list[list[float]], others: float) -> Row:
    operation, num_bytes, backend = case
    seconds = [value for values in by_start for value in values]
    p25, median, p75 = (round(quantile * 1e3, 5) for quantile in statistics.quantiles(seconds, n=4))
    return {
        "operation": operation,
        "num_bytes": num_bytes,
        "backend": backend,
        "num_ranks": num_ranks,
        "busy": busy,
        "num_calls": len(seconds),
        "median_ms": median,
        "p25_ms": p25,
        "p75_ms": p75,
        "start_medians_ms": [round(statistics.median(values) * 1e3, 5) for values in by_start],
        "others": round(others, 2),
    }
