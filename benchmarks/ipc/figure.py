"""Table and plot of a result of the ipc benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import where
from benchmarks.ipc import COLD, COLLECTIVES, STEPS

LABELS = {
    "ipc": "ipc",
    "gloo": "Gloo",
    "nccl": "NCCL",
    "open_mpi": "Open MPI",
    "copy": "plain copy",
    "ipc_async": "ipc, async",
    "gloo_async": "Gloo, async",
    "nccl_async": "NCCL, async",
    "deepspeed": "DeepSpeed",
    "none": "no communication",
    "copies": "copies only",
}
COLORS = {"ipc": "tab:blue", "gloo": "tab:red", "nccl": "tab:purple", "open_mpi": "tab:green", "copy": "tab:gray"}
COLORS |= {"ipc_async": "tab:cyan", "gloo_async": "tab:orange", "nccl_async": "tab:pink", "deepspeed": "tab:olive"}
COLORS |= {"none": "tab:gray", "copies": "tab:brown"}
# Share of other processes' CPU time above which a table contains a warning.
_BUSY_SHARE = 0.1
_COLUMNS = ("ipc", "gloo", "nccl", "copy", "open_mpi")
_COLD_COLUMNS = ("gloo", "ipc", "nccl", "gloo_async", "ipc_async", "nccl_async", "deepspeed")
_LEGEND = (
    "Medians of whole calls, barrier to last rank. copy: a plain copy of the tensor.",
    "gloo/ipc: how many times as long Gloo takes; above 1 ipc is faster.",
)
_STEP_LEGEND = (
    "Medians of steps that follow each other, slowest rank. alone: the same step in a group of one (FSDP2: a fake group).",
    "gloo +, ipc +: what the exchange adds to the step alone. +/+: how many times as much Gloo adds.",
    "copies: what a copying all_reduce of two ranks moves, without another rank.",
)
# Operation, ranks, loops, bytes.
Case = tuple[str, int, int, int]


def table(result: dict[str, Any]) -> str:
    """Return medians, one line per operation, ranks, loops and size, with a warning if the machine was busy."""
    found = medians(result["rows"])
    collectives = {case: by for case, by in found.items() if case[0] in COLLECTIVES}
    steps = {case: by for case, by in found.items() if case[0] in STEPS}
    cold = {case: by for case, by in found.items() if case[0] == COLD}
    lines = [*_collectives(collectives), "", *_LEGEND, ""] if collectives else []
    lines += [*_steps(steps), "", *_STEP_LEGEND, ""] if steps else []
    lines += [*_cold(cold), "", *_cold_legend(cold, result.get("deepspeed")), ""] if cold else []
    if (share := result["cpu_share_of_other_processes"]) > _BUSY_SHARE:
        lines += [
            f"warning: other processes used {share:.0%} of this machine meanwhile, so that these times say little about the backends; "
            "measure again on a quiet machine",
            "",
        ]
    return "\n".join(lines[:-1])


def medians(rows: list[dict[str, Any]]) -> dict[Case, dict[str, float]]:
    """Return median milliseconds by backend, by case in the order of measurement."""
    found: dict[Case, dict[str, float]] = {}
    for row in rows:
        # Older results have no loops.
        case = (row["operation"], row["num_ranks"], row.get("busy", 0), row["num_bytes"])
        found.setdefault(case, {})[row["backend"]] = row["median_ms"]
    return found


def added(by_backend: dict[str, float]) -> dict[str, float]:
    """Return what each backend adds to the same step or computing without communication, in milliseconds."""
    return {name: ms - by_backend["none"] for name, ms in by_backend.items() if name != "none"}


def quotient(dividend: float, divisor: float) -> str:
    """``4.2``; ``-`` if one is not positive, such as a difference within the noise."""
    return f"{dividend / divisor:.1f}" if min(dividend, divisor) > 0 else "-"


def _lines(titles: list[str], cells: dict[Case, list[str]]) -> list[str]:
    """Return a head and one line per case."""
    lines = [f"{'operation':<15}{'ranks':>6}{'loops':>6}{'KiB':>10}" + "".join(f"{title:>14}" for title in titles)]
    for (operation, ranks, loops, size), line in sorted(cells.items()):
        lines.append(f"{operation:<15}{ranks:>6}{loops:>6}{size / 1024:>10g}" + "".join(f"{cell:>14}" for cell in line))
    return lines


def _present(columns: tuple[str, ...], found: dict[Case, dict[str, float]]) -> list[str]:
    return [name for name in columns if any(name in by for by in found.values())]


def _collectives(found: dict[Case, dict[str, float]]) -> list[str]:
    backends = _present(_COLUMNS, found)
    cells = {
        case: [*(f"{by[name]:.3f}" if name in by else "-" for name in backends), quotient(by["gloo"], by["ipc"])]
        for case, by in found.items()
    }
    return _lines([*(f"{name}, ms" for name in backends), "gloo/ipc"], cells)


def _steps(found: dict[Case, dict[str, float]]) -> list[str]:
    backends, cells = _present(("gloo", "ipc", "nccl", "copies"), found), {}
    for case, by in found.items():
        more = added(by)
        cells[case] = [f"{by[name]:.3f}" if name in by else "-" for name in (*backends, "none")]
        cells[case] += [f"{more[name]:.3f}" if name in more else "-" for name in backends]
        cells[case] += [quotient(more["gloo"], more["ipc"]), quotient(by["gloo"], by["ipc"])]
    titles = [*(f"{name}, ms" for name in backends), "alone, ms", *(f"{name} +" for name in backends)]
    return _lines([*titles, "+/+", "gloo/ipc"], cells)


def _cold(found: dict[Case, dict[str, float]]) -> list[str]:
    # Its column is there also if DeepSpeed is missing.
    backends = [name for name in _COLD_COLUMNS if name == "deepspeed" or name in _present(_COLD_COLUMNS, found)]
    cells = {}
    for case, by in found.items():
        more = added(by)
        cells[case] = [f"{by['none'] * 1e3:.0f}"]
        cells[case] += [f"{more[name] * 1e3:.0f}" if name in more else "-" for name in backends]
    return _lines(["computing, µs", *(f"{name} +" for name in backends)], cells)


def _cold_legend(found: dict[Case, dict[str, float]], deepspeed: str | None) -> list[str]:
    lines = ["What a call adds to computing before it, microseconds, medians. async: async_op=True and wait()."]
    if not any("deepspeed" in by for by in found.values()):
        lines += [f"deepspeed: not measured: {deepspeed or 'only for CPU tensors'}"]
    return lines


def draw_panel(axis: Any, rows: list[dict[str, Any]], operation: str, num_ranks: int, busy: int = 0) -> None:
    """Draw one operation with one number of ranks and loops: median and quartiles over size, logarithmic axes.

    Args:
        axis: Axis of matplotlib.
        rows: As returned by `measure`; rows of other cases are skipped.
        operation: One of `OPERATIONS`.
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
