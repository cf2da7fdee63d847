"""Table and plot of a result of the ipc benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import where

LABELS = {"ipc": "ipc", "gloo": "Gloo", "nccl": "NCCL", "open_mpi": "Open MPI", "copy": "plain copy"}
COLORS = {"ipc": "tab:blue", "gloo": "tab:red", "nccl": "tab:purple", "open_mpi": "tab:green", "copy": "tab:gray"}
# Share of other processes' CPU time above which a table contains a warning.
_BUSY_SHARE = 0.1
_COLUMNS = ("ipc", "gloo", "nccl", "copy", "open_mpi")
_LEGEND = (
    "Medians of whole calls, barrier to last rank. copy: a plain copy of the tensor, in ddp_step the step without communication.",
    "gloo/ipc: how many times as long Gloo takes; above 1 ipc is faster.",
)


def table(result: dict[str, Any]) -> str:
    """Return medians, one line per operation, ranks, loops and size, with a warning if the machine was busy."""
    lines = [*_medians(result["rows"]), "", *_LEGEND]
    if (share := result["cpu_share_of_other_processes"]) > _BUSY_SHARE:
        lines += [
            f"warning: other processes used {share:.0%} of this machine meanwhile, so that these times say little about the backends; "
            "measure again on a quiet machine"
        ]
    return "\n".join(lines)


def _medians(rows: list[dict[str, Any]]) -> list[str]:
    medians: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for row in rows:
        key = (row["operation"], row["num_ranks"], row["busy"], row["num_bytes"])
        medians.setdefault(key, {})[row["backend"]] = row["median_ms"]
    backends = [backend for backend in _COLUMNS if any(backend in by for by in medians.values())]
    lines = [
        f"{'operation':<15}{'ranks':>5}{'loops':>6}{'KiB':>12}"
        + "".join(f"{f'{b}, ms':>14}" for b in backends)
        + f"{'gloo/ipc':>10}"
    ]
    for (operation, ranks, loops, size), by_backend in sorted(medians.items()):
        cells = "".join(f"{by_backend[b]:>14.3f}" if b in by_backend else f"{'-':>14}" for b in backends)
        faster = by_backend["gloo"] / by_backend["ipc"]
        lines.append(f"{operation:<15}{ranks:>5}{loops:>6}{size / 1024:>12g}{cells}{faster:>10.1f}")
    return lines


def draw_panel(axis: Any, rows: list[dict[str, Any]], operation: str, num_ranks: int, busy: int = 0) -> None:
    """Draw one operation with one number of ranks and loops: median and quartiles over size, logarithmic axes.

    Args:
        axis: Axis of matplotlib.
        rows: As returned by `measure`; rows of other cases are skipped.
        operation: One of `ranks.OPERATIONS`.
        num_ranks: Number of processes.
        busy: Number of endless loops beside them.
    """
    for backend, label in LABELS.items():
        points = sorted(
            (row["num_bytes"], row["median_ms"], row["p25_ms"], row["p75_ms"])
            for row in rows
            if (row["operation"], row["backend"], row["num_ranks"], row.get("busy", 0))
            == (operation, backend, num_ranks, busy)
        )
        if points:
            sizes, medians, low, high = zip(*points, strict=True)
            if operation == "ddp_step" and backend == "copy":
                label = "no communication"
            axis.plot(sizes, medians, marker="o", markersize=3, color=COLORS[backend], label=label)
            axis.fill_between(sizes, low, high, color=COLORS[backend], alpha=0.15)
    axis.set(
        xscale="log",
        yscale="log",
        title=f"{operation}, {num_ranks} ranks" + (f", {busy} loops beside" if busy else ""),
        xlabel="bytes",
        ylabel="ms",
    )
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def draw(result: dict[str, Any], target: Path) -> None:
    """Draw milliseconds over size, one panel per operation and number of ranks and loops, with median and quartiles.

    Args:
        result: The saved result.
        target: File of the picture; its suffix selects the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    lines = sorted({(row["num_ranks"], row["busy"]) for row in rows})
    figure, axes = plt.subplots(
        len(lines), len(operations), figsize=(4 * len(operations), 3.4 * len(lines)), squeeze=False
    )
    for line, (num_ranks, busy) in enumerate(lines):
        for column, operation in enumerate(operations):
            draw_panel(axes[line][column], rows, operation, num_ranks, busy)
    figure.suptitle(f"{where(result)}; median and quartiles")
    figure.tight_layout()
    figure.savefig(target, dpi=90)
    plt.close(figure)
