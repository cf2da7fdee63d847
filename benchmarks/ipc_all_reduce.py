"""How fast is the ipc backend beside Gloo, Open MPI and a plain copy, on this machine?

    python benchmarks/ipc_all_reduce.py [--ranks 2 4] [--rounds 5] [--out DIR]

Writes one dated JSON with hardware, versions and load into ``benchmarks/results``; ``plot_ipc.py`` draws it. Open MPI is
measured where ``mpirun`` and mpi4py are installed. Run it on a quiet machine: the load before and after is in the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from ray_fracbackend.ipc import bench


def cpu_model() -> str:
    """The CPU's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def caches() -> dict[str, str]:
    """Cache sizes of the first core, by level and type."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
        found[f"L{level} {kind}"] = (index / "size").read_text().strip()
    return found


def mpirun(num_ranks: int) -> list[str] | None:
    """Command for Open MPI's ranks, or None where it is not installed."""
    path = shutil.which("mpirun")
    if path is None or importlib.util.find_spec("mpi4py") is None:
        return None
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    yielding = ["--mca", "mpi_yield_when_idle", "1"] if num_ranks > (os.cpu_count() or 1) else []
    return [path, *root, "-n", str(num_ranks), "--oversubscribe", "--bind-to", "none", *yielding]


def versions() -> dict[str, str]:
    """Versions of everything that was measured."""
    result = {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()}
    if mpirun(2) is not None:
        text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
        result["open_mpi"] = text.splitlines()[0]
    return result


class OthersShare:
    """How much of the machine's CPU time went to other processes since this object was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_ticks = sum(usage.ru_utime + usage.ru_stime for usage in own) * os.sysconf("SC_CLK_TCK")
        return sum(ticks), ticks[3] + ticks[4], own_ticks

    def __call__(self) -> float:
        """A number from 0 (nothing else ran) to 1."""
        total, idle, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return round(max(0.0, total - idle - own) / total, 3)


class Progress:
    """A progress bar: tqdm where it is installed, else a line that rewrites itself."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar = None
        if importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(desc=title)

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show how far it is."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(done - self._bar.n)
        else:
            sys.stderr.write(f"\r{self._title}: {done}/{total} {what:<30}" + ("\n" if done == total else ""))

    def close(self) -> None:
        """Leave the line."""
        if self._bar is not None:
            self._bar.close()


def table(rows: list[dict]) -> str:
    """Medians in milliseconds, one line for each operation, number of ranks and size."""
    medians: dict[tuple, dict[str, float]] = {}
    for row in rows:
        key = (row["operation"], row["num_ranks"], row["num_bytes"])
        medians.setdefault(key, {})[row["backend"]] = row["median_ms"]
    lines = [
        f"{'operation':<15}{'ranks':>5}{'KiB':>9}" + "".join(f"{b:>11}" for b in bench.BACKENDS) + f"{'x Gloo':>9}"
    ]
    for (operation, ranks, size), by_backend in sorted(medians.items()):
        cells = "".join(f"{by_backend[b]:>11.3f}" if b in by_backend else f"{'-':>11}" for b in bench.BACKENDS)
        lines.append(f"{operation:<15}{ranks:>5}{size >> 10:>9}{cells}{by_backend['gloo'] / by_backend['ipc']:>9.1f}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=8, help="of a case, until other processes leave the machine alone")
    parser.add_argument("--operations", nargs="+", default=list(bench.OPERATIONS), choices=bench.OPERATIONS)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(bench.SIZES), help="bytes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    now = datetime.now(timezone.utc)
    load_before, others, rows = os.getloadavg(), OthersShare(), []
    for num_ranks in arguments.ranks:
        progress = Progress(f"{num_ranks} ranks")
        rows += bench.run_benchmark(
            num_ranks,
            operations=arguments.operations,
            sizes=arguments.sizes,
            rounds=arguments.rounds,
            tries=arguments.tries,
            mpirun=mpirun(num_ranks),
            progress=progress,
        )
        progress.close()
    result = {
        "benchmark": "ipc_all_reduce",
        "date": now.isoformat(timespec="seconds"),
        "hardware": {"cpu": cpu_model(), "cores": os.cpu_count(), "caches": caches()},
        "versions": versions(),
        "settings": {"threads_per_rank": 1, "rounds": arguments.rounds, "tries": arguments.tries, "dtype": "float32"},
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "cpu_share_of_other_processes": others(),
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"ipc_{now:%Y%m%d_%H%M}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
