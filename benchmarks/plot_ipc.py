"""Draws a result of ``ipc_all_reduce.py``: milliseconds over size, one panel an operation. Needs matplotlib.

python benchmarks/plot_ipc.py benchmarks/results/ipc_DATE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

LABELS = {"ipc": "ipc", "gloo": "Gloo", "open_mpi": "Open MPI", "copy": "plain copy"}
COLORS = {"ipc": "tab:blue", "gloo": "tab:red", "open_mpi": "tab:green", "copy": "tab:gray"}


def draw(path: Path) -> Path:
    """Draw one result file; returns the picture beside it."""
    result = json.loads(path.read_text())
    rows = result["rows"]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    all_ranks = sorted({row["num_ranks"] for row in rows})
    figure, axes = plt.subplots(
        len(all_ranks), len(operations), figsize=(4 * len(operations), 3.4 * len(all_ranks)), squeeze=False
    )
    for line, num_ranks in enumerate(all_ranks):
        for column, operation in enumerate(operations):
            axis = axes[line][column]
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
    hardware = result["hardware"]
    figure.suptitle(
        f"{hardware['cpu']}, {hardware['cores']} cores, torch {result['versions']['torch']}, {result['date']}; "
        "median and quartiles"
    )
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=90)
    return target


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(draw(Path(name)))
