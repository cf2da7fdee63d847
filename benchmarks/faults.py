"""Record how each failing start ends, with both engines: error, ranks, seconds, number of starts, and what is left.

The cases are in tests/faults/cases.py. The exit code is 1 if an end is not as the engine and the fault require: a wrong
rank, a restart too many, an error that comes later than start_timeout_s + 10 s, or something left behind.

usage: python benchmarks/faults.py [--timeout-s 10] [--limit-s 120] [--engines V1 V2] [--out FOLDER]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from common import RESULTS, parser, save

sys.path.append(str(RESULTS.parents[1]))

from tests.faults.cases import Case, cases
from tests.faults.runs import problems, run_cases


def run_engine(engine: str, some: Sequence[Case], timeout_s: float, limit_s: float) -> list[dict[str, Any]]:
    """Run some cases of an engine; one that it cannot have has the reason instead of an end."""
    cells = [{"engine": engine, **asdict(case), "why_not": why} for case in some if (why := case.why_not(engine))]
    for case, seen in run_cases(some, engine, timeout_s, limit_s):
        found = problems(case, engine, seen, timeout_s)
        cell = {"engine": engine, **asdict(case), "seen": seen, "problems": found, "load": os.getloadavg()[0]}
        cells.append(first_lines(cell))
        print(json.dumps(cells[-1]), flush=True)
    return cells


def first_lines(value: Any) -> Any:
    """Return a value with the first line of each text: the others are tracebacks and paths."""
    if isinstance(value, dict):
        return {key: first_lines(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [first_lines(each) for each in value]
    return value.partition("\n")[0] if isinstance(value, str) else value


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--timeout-s", type=float, default=10.0, help="start_timeout_s, timeout_s and Ray's shutdown's"
    )
    options.add_argument("--limit-s", type=float, default=120.0, help="seconds after the fault when a fit is given up")
    options.add_argument("--engines", nargs="+", choices=("V1", "V2"), default=["V1", "V2"])
    arguments = options.parse_args()
    limits, cells = (arguments.timeout_s, arguments.limit_s), []
    with ThreadPoolExecutor() as pool:  # side by side, because both wait most of the time
        side_by_side = [case for case in cases() if case.fault != "memory"]
        for found in pool.map(lambda engine: run_engine(engine, side_by_side, *limits), arguments.engines):
            cells += found
    for engine in arguments.engines:  # Ray's memory monitor counts the whole machine's
        cells += run_engine(engine, [case for case in cases() if case.fault == "memory"], *limits)
    settings = {"timeout_s": arguments.timeout_s, "limit_s": arguments.limit_s, "num_workers": 2}
    print(save("faults", arguments.out, {**settings, "cells": cells}))
    sys.exit(1 if any(cell.get("problems") for cell in cells) else 0)


if __name__ == "__main__":
    main()
