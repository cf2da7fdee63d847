"""Measure every case of the ipc benchmark. Driver side; imports torch, never Ray.

Open MPI is measured if ``mpirun`` and mpi4py are installed, NCCL on CUDA devices if it accepts the ranks, DeepSpeed's
operator for CPU tensors if it is installed and can be built.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ipc import COLD
from benchmarks.ipc.load import OthersShare
from benchmarks.ipc.ranks import run_benchmark
from ray_fracbackend.decide.nccl import NCCL_MULTI_RANK, multi_rank_env
from ray_fracbackend.worker.nccl_library import loaded_nccl_version

# Builds the operator, which takes half a minute the first time, and prints the version.
_DEEPSPEED = """
import deepspeed
operator = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder").load()
assert operator.vector_kernel_level(), "the processor lacks AVX2"
print(deepspeed.__version__)
"""


def measure(
    ranks: Sequence[int],
    *,
    busy: Sequence[int],
    operations: Sequence[str],
    sizes: Sequence[int] | None,
    rounds: int,
    starts: int,
    tries: int,
    device: str,
    progress: Callable[[int, int, str], None],
) -> dict[str, Any]:
    """Measure every operation and size for each number of ranks.

    Args:
        ranks: Numbers of processes, each measured separately.
        busy: Numbers of endless loops beside the ranks, each measured separately.
        operations: Names from `benchmarks.ipc.OPERATIONS`.
        sizes: Bytes of the float32 tensors, or None for those of `benchmarks.ipc.SIZES`.
        rounds: Number of repetitions in one start; medians are over all rounds of all starts.
        starts: Number of times that the processes are started.
        tries: Maximum number of tries of a case while other processes use the machine.
        device: ``"cpu"``, or ``"cuda"`` for tensors on the first CUDA device that torch sees, which all ranks share.
        progress: Called as ``progress(done, total, what)``, for each number of ranks and loops from the start.

    Returns:
        Plain values for JSON: settings, load, details of the machine beyond `benchmarks.common.environment`, and
        ``rows`` from `run_benchmark`.

    Raises:
        RuntimeError: A rank failed; the message contains its output.
    """
    has_deepspeed, deepspeed = _deepspeed() if COLD in operations and device == "cpu" else (False, None)
    others, rows = OthersShare(), []
    for num_ranks, loops in itertools.product(ranks, busy):
        rows += run_benchmark(
            num_ranks,
            busy=loops,
            operations=operations,
            sizes=sizes,
            rounds=rounds,
            starts=starts,
            tries=tries,
            device=device,
            nccl_env=nccl_env(num_ranks) if device == "cuda" else None,
            mpirun=mpirun(num_ranks) if device == "cpu" else None,
            deepspeed=has_deepspeed,
            progress=lambda done, total, what, of=f"{num_ranks} ranks, {loops} loops": progress(
                done, total, f"{of}, {what}"
            ),
        )
    return {
        "caches": _caches(),
        "open_mpi": _mpi_version() if device == "cpu" else None,
        "deepspeed": deepspeed,
        "settings": {
            "threads_per_rank": 1,
            "rounds": rounds,
            "starts": starts,
            "tries": tries,
            "dtype": "float32",
            "device": device,
        },
        "cpu_share_of_other_processes": others(),
        "rows": rows,
    }


def _caches() -> dict[str, str]:
    """Return the cache sizes of the first core, by level and type."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
        found[f"L{level} {kind}"] = (index / "size").read_text().strip()
    return found


def mpirun(num_ranks: int) -> list[str] | None:
    """Return the command for Open MPI's ranks, None if it is not installed."""
    path = shutil.which("mpirun")
    if path is None or importlib.util.find_spec("mpi4py") is None:
        return None
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    yielding = ["--mca", "mpi_yield_when_idle", "1"] if num_ranks > (os.cpu_count() or 1) else []
    return [path, *root, "-n", str(num_ranks), "--oversubscribe", "--bind-to", "none", *yielding]


def _mpi_version() -> str | None:
    if mpirun(2) is None:
        return None
    text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    return text.splitlines()[0]


def _deepspeed() -> tuple[bool, str]:
    """Return whether DeepSpeed's operator works here, and its version or the reason."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", _DEEPSPEED], env=env, capture_output=True, text=True, check=False)
    works = done.returncode == 0
    return works, (done.stdout if works else done.stderr).splitlines()[-1]


def nccl_env(num_ranks: int) -> dict[str, str] | None:
    """Return the variables with which NCCL accepts this many ranks on one device, None if it does not."""
    if num_ranks == 1:
        return {}
    return multi_rank_env(num_ranks) if (loaded_nccl_version() or ()) >= NCCL_MULTI_RANK else None
