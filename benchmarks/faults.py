"""Measure the error and its delay for each fault of a worker (killed, stopped, raising, hanging, wrong results).

One fault in one of two CPU workers, in each phase of a run, with both of our backends and with stock Ray's TorchConfig.
The exit code is 1 if one of our starts took more than start_timeout_s + 10 s to fail, did not name the rank, or left
something behind.

usage: python benchmarks/faults.py [--timeout-s 10] [--limit-s 60] [--engines V1 V2] [--out FOLDER]
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from common import RESULTS, parser, save

sys.path.append(str(RESULTS.parents[1]))

from tests.faults.runs import plantings, problems, run_cells, too_late


def run_engine(engine: str, timeout_s: float, limit_s: float) -> list[dict[str, Any]]:
    """Run every cell of an engine."""
    cells = []
    for planting, seen in run_cells(plantings(), engine, timeout_s, limit_s):
        found = []
        if planting.config == "ours":
            found = problems(planting, seen) + (["too late"] if too_late(planting, seen, timeout_s) else [])
        cells.append(
            {"engine": engine, **asdict(planting), "seen": seen, "problems": found, "load": os.getloadavg()[0]}
        )
        print(json.dumps(cells[-1]), flush=True)
    return cells


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--timeout-s", type=float, default=10.0, help="start_timeout_s, timeout_s and Ray's shutdown's"
    )
    options.add_argument("--limit-s", type=float, default=60.0, help="seconds after the fault when a fit is given up")
    options.add_argument("--engines", nargs="+", choices=("V1", "V2"), default=["V1", "V2"])
    arguments = options.parse_args()
    with ThreadPoolExecutor() as pool:  # side by side, because both wait most of the time
        runs = pool.map(lambda engine: run_engine(engine, arguments.timeout_s, arguments.limit_s), arguments.engines)
        cells = [cell for run in runs for cell in run]
    settings = {"timeout_s": arguments.timeout_s, "limit_s": arguments.limit_s, "num_workers": 2}
    print(save("faults", arguments.out, {**settings, "cells": cells}))
    sys.exit(1 if any(cell["problems"] for cell in cells) else 0)


if __name__ == "__main__":
    main()
