"""Compare two checkouts: on_start and the ipc backend of both, in turn, in one run.

    python benchmarks/checkouts.py OLD [--turns 3] [--starts 3] [--workers 2] [--ranks 2]
        [--sizes BYTES ...] [--out FOLDER]

OLD is a folder with the other checkout, for example from ``git worktree add --detach OLD REVISION``; the new one is the
checkout of this script. Each turn runs benchmarks/start.py of both, then four times benchmarks/ipc of both, in separate
processes and in alternating order. It writes one dated JSON with the medians over all turns and their ratios. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import environment, parser, save

# Starts of the processes of an all_reduce in one turn.
IPC_STARTS = 4
SIZES = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 25 << 20, 100 << 20]
NEW = Path(__file__).resolve().parents[1]


def run(checkout: Path, *command: str) -> dict[str, Any]:
    """Return the result that a benchmark of a checkout writes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *command, "--out", folder]
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run(command, cwd=checkout, env=env, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob("*.json")
        return json.loads(path.read_text())


def ipc_command(checkout: Path) -> list[str]:
    """Return the command of its ipc benchmark, which was a script until 2026-11-26."""
    script = "benchmarks/ipc_all_reduce.py"
    return [script] if (checkout / script).exists() else ["-m", "benchmarks.ipc"]


def starts(result: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Return the milliseconds of each of our on_start calls, by kind."""
    for kind in ("new processes", "same workers"):
        for row in result["rows"][kind]:
            yield (
                f"on_start, {row['num_workers']} workers, {kind}",
                [1e3 * seconds for seconds in row["seconds"]["ours"]],
            )


def collectives(result: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Return the median milliseconds of each ipc case, one for each start of its processes."""
    for row in result["rows"]:
        if row["backend"] == "ipc":
            yield f"ipc {row['operation']}, {row['num_ranks']} ranks, {row['num_bytes']} bytes", row["start_medians_ms"]


def revision(checkout: Path) -> str:
    """Return the commit of a checkout, with a mark if files differ from it."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("old", type=Path)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--starts", type=int, default=3, help="of each kind in one turn")
    options.add_argument("--workers", type=int, nargs="+", default=[2], help="of a start")
    options.add_argument("--ranks", type=int, nargs="+", default=[2], help="of an all_reduce")
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the float32 tensors")
    chosen = options.parse_args()
    of_starts = ["--starts", str(chosen.starts), "--workers", *map(str, chosen.workers)]
    of_ipc = ["--ranks", *map(str, chosen.ranks), "--sizes", *map(str, chosen.sizes), "--operations", "all_reduce"]
    of_ipc += ["--rounds", "1", "--starts", "1"]
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(chosen.turns):
        # In short parts: a slow minute of the machine then affects both sides.
        for part in range(1 + IPC_STARTS):
            sides = [("old", chosen.old.resolve()), ("new", NEW)]
            for side, checkout in sides if (turn + part) % 2 == 0 else reversed(sides):
                if part == 0:
                    values = dict(starts(run(checkout, "benchmarks/start.py", *of_starts)))
                else:
                    values = dict(collectives(run(checkout, *ipc_command(checkout), *of_ipc)))
                for name, milliseconds in values.items():
                    found.setdefault(name, {}).setdefault(side, []).extend(milliseconds)
            print(f"turn {turn + 1} of {chosen.turns}, part {part + 1} of {1 + IPC_STARTS}", flush=True)
    rows = []
    for name, by_side in found.items():
        old, new = (statistics.median(by_side[side]) for side in ("old", "new"))
        rows.append({"case": name, "old_ms": old, "new_ms": new, "new_over_old": new / old, "all_ms": by_side})
        print(f"{name:<45}{old:>10.3f}{new:>10.3f}{new / old:>7.2f}x")
    result = {"old": revision(chosen.old), "new": revision(NEW), "environment": environment(), "rows": rows}
    print(f"written to {save('checkouts', chosen.out, result)}")


if __name__ == "__main__":
    main()
