"""Benchmark of the ipc backend beside Gloo, NCCL, a plain copy and Open MPI: measure, table, plot. Driver side.

Open MPI is measured where ``mpirun`` and mpi4py are installed, NCCL on CUDA devices where it accepts the ranks. CPU time
of other processes meanwhile is part of the result.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from ray_fracbackend.cli import bench_ranks
from ray_fracbackend.cli.arguments import PROGRAM
from ray_fracbackend.cli.ending import say
from ray_fracbackend.decide.nccl import NCCL_MULTI_RANK, multi_rank_env
from ray_fracbackend.decide.worker_info import version_text
from ray_fracbackend.worker.nccl_library import loaded_nccl_version

LABELS = {"ipc": "ipc", "gloo": "Gloo", "nccl": "NCCL", "open_mpi": "Open MPI", "copy": "plain copy"}
# Of other processes' CPU time, above which a table carries a warning.
_BUSY_SHARE = 0.1
_ELEMENT_BYTES = 4
# Of the size of a case: inputs and outputs of each backend, and a DDP step's parameters, gradients and buckets.
_TENSORS_PER_RANK = 8
_LEGEND = (
    "Medians of whole calls, barrier to last rank. copy: a plain copy of the tensor, in ddp_step the step without communication.",
    "gloo/ipc: how many times as long Gloo takes; above 1 ipc is faster.",
)
COLORS = {"ipc": "tab:blue", "gloo": "tab:red", "nccl": "tab:purple", "open_mpi": "tab:green", "copy": "tab:gray"}


def measure(
    ranks: Sequence[int],
    *,
    operations: Sequence[str] = bench_ranks.OPERATIONS,
    sizes: Sequence[int] = bench_ranks.SIZES,
    rounds: int = 5,
    starts: int = 1,
    tries: int = 8,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure every operation and size for each number of ranks, with a progress bar on terminals.

    Args:
        ranks: Numbers of processes, each measured on its own.
        operations: Of `bench_ranks.OPERATIONS`.
        sizes: Bytes of the float32 tensors.
        rounds: How often everything is measured in one start; medians are over all rounds of all starts.
        starts: How often the processes are started anew.
        tries: Most tries of a case, while other processes use the machine.
        device: ``"cpu"``, or ``"cuda"`` for tensors on the first CUDA device that torch sees, which all ranks share.

    Returns:
        Plain values for JSON: date, hardware, versions, load and ``rows`` as `bench_ranks.run_benchmark` gives them.

    Raises:
        RuntimeError: A rank failed; the message has its output.
    """
    from tqdm import tqdm

    now = datetime.now(timezone.utc)
    load_before, others, rows = os.getloadavg(), _OthersShare(), []
    for num_ranks in ranks:
        with tqdm(desc=f"{num_ranks} ranks", disable=None) as bar:
            estimate = _Estimate(num_ranks, starts * rounds, bar.disable)

            def show(done: int, total: int, what: str, bar: Any = bar, estimate: _Estimate = estimate) -> None:
                bar.total = total
                bar.set_postfix_str(what, refresh=False)
                bar.update(done - bar.n)
                estimate.update(done, total)

            rows += bench_ranks.run_benchmark(
                num_ranks,
                operations=operations,
                sizes=sizes,
                rounds=rounds,
                starts=starts,
                tries=tries,
                device=device,
                nccl_env=_nccl_env(num_ranks) if device == "cuda" else None,
                mpirun=mpirun(num_ranks) if device == "cpu" else None,
                progress=show,
            )
    return {
        "benchmark": "ipc",
        "date": now.isoformat(timespec="seconds"),
        "hardware": {"cpu": _cpu_model(), "cores": os.cpu_count(), "caches": _caches(), "gpus": _gpus(device)},
        "versions": _versions(device),
        "settings": {
            "threads_per_rank": 1,
            "rounds": rounds,
            "starts": starts,
            "tries": tries,
            "dtype": "float32",
            "device": device,
        },
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "cpu_share_of_other_processes": others(),
        "rows": rows,
    }


def check(ranks: Sequence[int], sizes: Sequence[int], device: str, picture: Path | None) -> None:
    """Check what a measurement needs before it takes minutes.

    Args:
        ranks: Numbers of processes.
        sizes: Bytes of the tensors.
        device: ``"cpu"`` or ``"cuda"``.
        picture: File to draw to, None for no picture.

    Raises:
        ValueError: Tensors with less than an element per rank or for which memory is too small, or a picture that cannot be
            written; the message has value, rule and fix.
    """
    least, most = _ELEMENT_BYTES * max(ranks), max(sizes) * max(ranks) * _TENSORS_PER_RANK
    if min(sizes) < least:
        raise ValueError(
            f"--sizes {min(sizes)}: must be at least {least} bytes, a float32 for each of {max(ranks)} ranks"
        )
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]
    if most > free:
        raise ValueError(
            f"--sizes {max(sizes)} with {max(ranks)} ranks: needs {_gib(most)} of memory, and {_gib(free)} are free; ask for "
            "smaller sizes or fewer ranks"
        )
    if picture is not None:
        _check_picture(picture)


def _check_picture(picture: Path) -> None:
    from matplotlib.figure import Figure

    formats = sorted(Figure().canvas.get_supported_filetypes())
    if picture.suffix[1:].lower() not in formats:
        raise ValueError(f"--plot {picture}: must end in one of {', '.join(f'.{name}' for name in formats)}")
    folder = picture.absolute().parent
    if picture.is_dir() or not os.access(picture if picture.exists() else folder, os.W_OK):
        missing = "is not a folder" if not folder.is_dir() else "cannot be written"
        raise ValueError(
            f"--plot {picture}: {picture if folder.is_dir() else folder} {missing}; name a file in a folder of yours"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def table(result: dict[str, Any]) -> str:
    """Format medians, one line for each operation, number of ranks and size, with units and a caveat on a busy machine.

    Args:
        result: As `measure` returns it.
    """
    lines = [*_medians(result["rows"]), "", *_LEGEND]
    if (share := result["cpu_share_of_other_processes"]) > _BUSY_SHARE:
        lines += [
            f"warning: other processes used {share:.0%} of this machine meanwhile, so that these times say little about the backends; "
            "measure again on a quiet machine"
        ]
    return "\n".join(lines)


def _medians(rows: list[dict[str, Any]]) -> list[str]:
    medians: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        key = (row["operation"], row["num_ranks"], row["num_bytes"])
        medians.setdefault(key, {})[row["backend"]] = row["median_ms"]
    backends = [backend for backend in bench_ranks.BACKENDS if any(backend in by for by in medians.values())]
    lines = [
        f"{'operation':<15}{'ranks':>5}{'KiB':>12}"
        + "".join(f"{f'{b}, ms':>14}" for b in backends)
        + f"{'gloo/ipc':>10}"
    ]
    for (operation, ranks, size), by_backend in sorted(medians.items()):
        cells = "".join(f"{by_backend[b]:>14.3f}" if b in by_backend else f"{'-':>14}" for b in backends)
        faster = by_backend["gloo"] / by_backend["ipc"]
        lines.append(f"{operation:<15}{ranks:>5}{size / 1024:>12g}{cells}{faster:>10.1f}")
    return lines


def draw_panel(axis: Any, rows: list[dict[str, Any]], operation: str, num_ranks: int) -> None:
    """Draw one operation with one number of ranks: milliseconds over size, median and quartiles, both axes logarithmic.

    Args:
        axis: Of matplotlib.
        rows: As `measure` returns them; the others are skipped.
        operation: Of `bench_ranks.OPERATIONS`.
        num_ranks: Processes.
    """
    for backend, label in LABELS.items():
        points = sorted(
            (row["num_bytes"], row["median_ms"], row["p25_ms"], row["p75_ms"])
            for row in rows
            if (row["operation"], row["backend"], row["num_ranks"]) == (operation, backend, num_ranks)
        )
        if points:
            sizes, medians, low, high = zip(*points, strict=True)
            if operation == "ddp_step" and backend == "copy":
                label = "no communication"
            axis.plot(sizes, medians, marker="o", markersize=3, color=COLORS[backend], label=label)
            axis.fill_between(sizes, low, high, color=COLORS[backend], alpha=0.15)
    axis.set(xscale="log", yscale="log", title=f"{operation}, {num_ranks} ranks", xlabel="bytes", ylabel="ms")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def draw(result: dict[str, Any], target: Path) -> None:
    """Draw milliseconds over size, one panel an operation and number of ranks, with median and quartiles.

    Args:
        result: As `measure` returns it.
        target: Picture to write; its suffix is the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    all_ranks = sorted({row["num_ranks"] for row in rows})
    figure, axes = plt.subplots(
        len(all_ranks), len(operations), figsize=(4 * len(operations), 3.4 * len(all_ranks)), squeeze=False
    )
    for line, num_ranks in enumerate(all_ranks):
        for column, operation in enumerate(operations):
            draw_panel(axes[line][column], rows, operation, num_ranks)
    hardware = result["hardware"]
    figure.suptitle(
        f"{hardware['cpu']}, {hardware['cores']} cores, torch {result['versions']['torch']}, {result['date']}; "
        "median and quartiles"
    )
    figure.tight_layout()
    figure.savefig(target, dpi=90)
    plt.close(figure)


def _cpu_model() -> str:
    """Return the CPU's name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _caches() -> dict[str, str]:
    """Return the cache sizes of the first core, by level and type."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
        found[f"L{level} {kind}"] = (index / "size").read_text().strip()
    return found


def mpirun(num_ranks: int) -> list[str] | None:
    """Return the command for Open MPI's ranks, None where it is not installed."""
    path = shutil.which("mpirun")
    if path is None or importlib.util.find_spec("mpi4py") is None:
        return None
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    yielding = ["--mca", "mpi_yield_when_idle", "1"] if num_ranks > (os.cpu_count() or 1) else []
    return [path, *root, "-n", str(num_ranks), "--oversubscribe", "--bind-to", "none", *yielding]


def _nccl_env(num_ranks: int) -> dict[str, str] | None:
    """Return the variables with which NCCL accepts this many ranks on one device, None where it does not."""
    if num_ranks == 1:
        return {}
    return multi_rank_env(num_ranks) if (loaded_nccl_version() or ()) >= NCCL_MULTI_RANK else None


def _gpus(device: str) -> list[str]:
    """Return the name of the device that the tensors are on."""
    return [torch.cuda.get_device_name(0)] if device == "cuda" else []


def _versions(device: str) -> dict[str, str]:
    """Return the versions of everything that was measured."""
    result = {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()}
    if device == "cuda":
        result |= {"cuda": str(torch.version.cuda), "nccl": version_text(loaded_nccl_version())}
    elif mpirun(2) is not None:
        text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
        result["open_mpi"] = text.splitlines()[0]
    return result


class _Estimate:
    """A line about the time that is left, once the first round has shown it, where there is no terminal for a bar."""

    def __init__(self, num_ranks: int, num_rounds: int, wanted: bool) -> None:
        self._what = f"{num_ranks} ranks"
        self._num_rounds = num_rounds
        self._wanted = wanted and num_rounds > 1
        self._started = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """Print the line after the first round."""
        if self._wanted and done * self._num_rounds >= total:
            self._wanted = False
            left_s = (time.monotonic() - self._started) * (self._num_rounds - 1)
            say(f"{PROGRAM} bench", f"{self._what}: one round of {self._num_rounds} is done, about {left_s:.0f} s left")


class _OthersShare:
    """Share of the machine's CPU time that other processes used since this object was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        import resource  # Unix only; the module has to import on Windows too

        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_ticks = sum(usage.ru_utime + usage.ru_stime for usage in own) * os.sysconf("SC_CLK_TCK")
        return sum(ticks), ticks[3] + ticks[4], own_ticks

    def __call__(self) -> float:
        """Return the share, from 0 (nothing else ran) to 1."""
        total, idle, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return round(max(0.0, total - idle - own) / total, 3)
