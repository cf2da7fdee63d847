"""Draws the newest result of each benchmark. usage: python benchmarks/plots.py [--check] [--results FOLDER] [--out FOLDER]

Needs matplotlib. Run it after adding a JSON to benchmarks/results. The pictures in docs/figures keep their names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from tables import size_text

# When run as a script, its own folder comes first in sys.path.
sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, newest, where
from benchmarks.ipc.figure import COLORS, draw_panel

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8a8a",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    # The same input produces the same file.
    "svg.hashsalt": "ray_fracbackend",
}
_BLUE, _LIGHT_BLUE, _GRAY, _ORANGE = "#2f6db3", "#8fb8de", "#7a7a7a", "#c77b30"
_STARTS = {
    "stock": ("TorchConfig", _GRAY),
    "ours": ("FracTorchConfig", _BLUE),
    "ours_without_verification": ("FracTorchConfig(verify=False)", _LIGHT_BLUE),
}


def source(path: Path) -> str:
    """Return name and state of a result, as the title of its picture; a test detects an outdated picture by it."""
    return f"{path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def save(figure: Any, target: Path, result: dict[str, Any], told: str, top: float = 1) -> None:
    """Write the picture with a description and the machine below it."""
    figure.tight_layout(rect=(0, 0.36 / figure.get_figheight(), 1, top))
    figure.text(0.012, 0.06 / figure.get_figheight(), f"{told}\n{where(result)}", color="#57606a", va="bottom")
    title = {"Title": result["source"]}
    drawn, titles = figure.get_tightbbox(), [axis.title.get_window_extent() for axis in figure.axes]
    if not figure.bbox_inches.contains(*drawn.min) or not figure.bbox_inches.contains(*drawn.max):
        sys.exit(f"{target}: something is cut at the edge")
    if any(left.overlaps(right) for left, right in pairwise(titles)):
        sys.exit(f"{target}: titles overlap")
    figure.savefig(target, metadata={**title, "Date": None} if target.suffix == ".svg" else title)
    plt.close(figure)


def plain(axis: Any, unit: Callable[[float], str] = "{:g}".format) -> None:
    """Show numbers instead of powers of ten on an axis."""
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: unit(value)))


def dots(axis: Any, x: float, values: Sequence[float], color: str, label: str | None) -> None:
    """Draw every value as a dot and their median as a line."""
    axis.plot([x] * len(values), values, "o", color=color, markersize=3.5, alpha=0.45, markeredgewidth=0)
    median = statistics.median(values)
    axis.plot([x - 0.07, x + 0.07], [median] * 2, color=color, linewidth=2.2, label=label)
    axis.annotate(f"{median:.{0 if median >= 10 else 1}f}", (x + 0.085, median), color=color, va="center")


def start(result: dict[str, Any], target: Path) -> None:
    """Draw milliseconds of on_start over workers, in new processes and on the same ones; and seconds until training."""
    kinds = {
        "new processes": ("in new processes, as Ray Train makes them", 1e3),
        "same workers": ("again on the same workers", 1e3),
        "until training": ("from fit() to the train function", 1),
    }
    figure, axes = plt.subplots(1, len(kinds), figsize=(9.4, 3.3))
    axes[1].sharey(axes[0])
    for axis, (kind, (title, factor)) in zip(axes, kinds.items(), strict=True):
        rows = result["rows"][kind]
        for x, row in enumerate(rows):
            for number, (name, seconds) in enumerate(row["seconds"].items()):
                label, color = _STARTS[name]
                place = x + (number - (len(row["seconds"]) - 1) / 2) * 0.9 / len(row["seconds"])
                dots(axis, place, [value * factor for value in seconds], color, None if x else label)
        axis.set(title=title, xlabel="workers", xlim=(-0.6, len(rows) - 0.4))
        axis.set_xticks(range(len(rows)), [str(row["num_workers"]) for row in rows])
        axis.grid(axis="y", alpha=0.3)
    axes[0].set(ylabel="on_start, ms", yscale="log")
    plain(axes[0].yaxis)
    axes[2].set(ylabel="time, s", ylim=(0, None))
    figure.legend(*axes[1].get_legend_handles_labels(), loc="upper center", ncol=3)
    told = f"Ray Train {result['engine'].upper()}, CPU workers, Gloo; dots: {result['num_starts']} starts each, line: median"
    save(figure, target, result, told, top=0.93)


def planning(result: dict[str, Any], target: Path) -> None:
    """Draw milliseconds of the decision over workers."""
    figure, axis = plt.subplots(figsize=(4.6, 3.3))
    for ranks_per_gpu, color in ((1, _BLUE), (2, _ORANGE)):
        points = [
            (row["num_workers"], row["median_s"] * 1e3)
            for row in result["rows"]
            if row["ranks_per_gpu"] == ranks_per_gpu
        ]
        label = f"{ranks_per_gpu} worker{'s' if ranks_per_gpu > 1 else ''} a GPU"
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=label)
    axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="decision, ms")
    plain(axis.xaxis, "{:,.0f}".format)
    plain(axis.yaxis)
    axis.grid(alpha=0.3)
    axis.legend()
    save(figure, target, result, "decide_start() on made-up facts; medians")


def ipc(result: dict[str, Any], target: Path) -> None:
    """Draw milliseconds of an all_reduce over its size, one panel per number of ranks."""
    numbers = sorted({row["num_ranks"] for row in result["rows"]})
    figure, axes = plt.subplots(1, len(numbers), figsize=(3.8 * len(numbers), 3.3), sharey=True, squeeze=False)
    for axis, num_ranks in zip(axes[0], numbers, strict=True):
        draw_panel(axis, result["rows"], "all_reduce", num_ranks)
        sizes = sorted({row["num_bytes"] for row in result["rows"]})
        axis.set_xticks(sizes, [size_text(size) for size in sizes], rotation=30)
        axis.set(xlabel="size of the tensor", ylabel="all_reduce, ms" if axis is axes[0][0] else None)
        axis.minorticks_off()
        plain(axis.yaxis)
    save(figure, target, result, "CPU tensors, float32, ranks on one machine; lines: medians, bands: quartiles")


def ipc_demo(result: dict[str, Any], target: Path) -> None:
    """Draw milliseconds of an epoch of the demo by backend."""
    figure, axis = plt.subplots(figsize=(4.6, 3.3))
    backends = ("gloo", "ipc")
    for x, backend in enumerate(backends):
        dots(axis, x, [value * 1e3 for value in result["seconds"][backend]], COLORS[backend], None)
    axis.set(ylabel="epoch of the demo, ms", xlim=(-0.6, 1.6), ylim=(0, None))
    axis.set_xticks(range(len(backends)), backends)
    axis.grid(axis="y", alpha=0.3)
    save(figure, target, result, f"{result['num_workers']} CPU workers under Ray Train; dots: epochs, line: median")


def scale(result: dict[str, Any], target: Path) -> None:
    """Draw the cost of a start for the driver in simulation, in seconds and bytes, and the cost of real processes."""
    simulated, real = result["simulated"], result["real"]
    figure, axes = plt.subplots(1, 3, figsize=(9.4, 3.3))
    workers = [row["num_workers"] for row in simulated]
    phases = {"probe_s": _GRAY, "plan_s": _BLUE, "start_s": _ORANGE, "report_s": _LIGHT_BLUE}
    for phase, color in phases.items():
        seconds = [row[phase] for row in simulated]
        axes[0].plot(workers, seconds, marker="o", markersize=4, color=color, label=phase.removesuffix("_s"))
    for phase, color in (("probe", _GRAY), ("start", _ORANGE)):
        for way, line in (("to", "-"), ("from", "--")):
            # The functions of a phase had other names in earlier results.
            calls = [row[f"bytes_{way}_workers"] for row in simulated]
            mib = [sum(num for call, num in row.items() if call.startswith(phase)) / 2**20 for row in calls]
            axes[1].plot(workers, mib, line, marker="o", markersize=4, color=color, label=f"{phase}, {way} the workers")
    rounds = ", ".join(sorted({f"{row['rounds']:g}" for row in simulated}))
    ranks = [row["num_ranks"] for row in real]
    for key, label, color in (
        ("total_s", "all ranks through", _BLUE),
        ("verification_s", "verification, part of it", _ORANGE),
    ):
        axes[2].plot(ranks, [row[key] for row in real], marker="o", markersize=4, color=color, label=label)
    titles = ("driver, simulated workers", f"messages, simulated workers; {rounds} rounds", "real processes, Gloo")
    for axis, title, unit in zip(axes, titles, ("s", "MiB", "s"), strict=True):
        axis.set(title=title, xscale="log", yscale="log", xlabel="workers", ylabel=unit)
        plain(axis.xaxis, "{:,.0f}".format)
        plain(axis.yaxis)
        axis.grid(alpha=0.3)
        axis.legend()
    for axis in axes[:2]:
        axis.set_ylim(top=axis.get_ylim()[1] * 100)  # room for the legend
    axes[2].set_xscale("log", base=2)
    axes[2].set(yscale="linear", ylim=(0, None))
    plain(axes[2].xaxis)
    save(
        figure,
        target,
        result,
        "Simulated: the driver's own code, without Ray's messages. Real: forked processes, without Ray",
    )


FIGURES: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "start_v1": start,
    "start_v2": start,
    "planning": planning,
    "ipc": ipc,
    "ipc_demo": ipc_demo,
    "scale": scale,
}


def is_of(picture: Path, path: Path) -> bool:
    """Return whether the picture was drawn from the current result."""
    return picture.exists() and f"<dc:title>{source(path)}</dc:title>" in picture.read_text()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--check", action="store_true", help="draw nothing; exit code 1 where a picture is out of date"
    )
    arguments.add_argument("--results", type=Path, default=RESULTS)
    arguments.add_argument("--out", type=Path, default=RESULTS.parents[1] / "docs" / "figures")
    arguments.add_argument("--format", choices=("svg", "png"), default="svg")
    options = arguments.parse_args()
    found = {name: path for name in FIGURES if (path := newest(name, options.results))}
    if options.check:
        stale = [name for name, path in found.items() if not is_of(options.out / f"{name}.svg", path)]
        sys.exit(f"out of date: {', '.join(stale)}. Run python benchmarks/plots.py" if stale else 0)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, path in found.items():
        target = options.out / f"{name}.{options.format}"
        with plt.rc_context(_STYLE):
            FIGURES[name]({**json.loads(path.read_text()), "source": source(path)}, target)
        print(f"{target} from {path.name}")


if __name__ == "__main__":
    main()
