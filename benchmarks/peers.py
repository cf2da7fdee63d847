"""Run test suites of other projects on stock's side and on ours: passing tests, differences and duration.

torch's DistributedTest comes with its wheel. TORCH_CHECKOUT and RAY_CHECKOUT name checkouts of PyTorch and Ray for the
other suites. A run adds to the file of the day, so suites can be run one by one. The exit code is 1 if a test differs
that is not in tests/peers/differences.py.

usage: python benchmarks/peers.py [--suites NAME ...] [--out FOLDER]
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, parser, save

sys.path.append(str(RESULTS.parents[1]))

from tests.peers import differences
from tests.peers.runner import Suite, run, worse
from tests.peers.suites import ALL


def compare(suite: Suite) -> dict[str, Any]:
    """Run every side of a suite, one after the other."""
    runs = {}
    for side in suite.sides:
        print(f"=== {suite.name} on {side}", flush=True)
        runs[side] = run(suite, side)
        print(f"{len(runs[side].passed())} passed in {runs[side].seconds:.0f} s", flush=True)
    stock = next(iter(suite.sides))
    sides = {}
    for side, done in runs.items():
        skipped = sum(outcome == "skipped" for outcome in done.outcomes.values())
        found = worse(runs[stock], done)
        sides[side] = {
            "passed": len(done.passed()),
            "failed": len(done.outcomes) - len(done.passed()) - skipped,
            "skipped": skipped,
            "seconds": round(done.seconds, 1),
            "differences": [
                {"test": test, "outcome": outcome[:300], "reason": differences.reason(suite.name, test)}
                for test, outcome in found.items()
            ],
        }
        for each in sides[side]["differences"]:
            print(json.dumps(each), flush=True)
    return {"suite": suite.name, "of": suite.of, "sides": sides}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--suites", nargs="+", metavar="NAME", help="by a part of their names; all by default")
    given = options.parse_args()
    chosen = [suite for suite in ALL if not given.suites or any(name in suite.name for name in given.suites)]
    if not chosen:
        sys.exit(f"no suite has {given.suites} in its name; there are: {', '.join(suite.name for suite in ALL)}")
    rows, problems = earlier(given.out), []
    for suite in chosen:
        if suite.missing():
            print(f"{suite.name}: {suite.missing()}", flush=True)
            continue
        try:
            rows[suite.name] = compare(suite)
        except RuntimeError as error:  # such as a file that another release of torch cannot read
            print(error, flush=True)
            problems.append(f"{suite.name}: did not run to its end")
        save("peers", given.out, {"rows": [rows[each.name] for each in ALL if each.name in rows]})
    problems += [
        f"{suite.name}: {each['test']} on {side}"
        for suite in chosen
        for side, found in rows.get(suite.name, {"sides": {}})["sides"].items()
        for each in found["differences"]
        if each["reason"] is None
    ]
    if problems:
        sys.exit("\n".join(["not explained:", *problems]))


def earlier(out: Path) -> dict[str, Any]:
    """Return the content of today's file."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    path = out / f"peers_{today}.json"
    return {row["suite"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


if __name__ == "__main__":
    main()
