"""How fast is the ipc backend beside Gloo, Open MPI and a plain copy, on this machine?

    python benchmarks/ipc_all_reduce.py [--ranks 2 4] [--rounds 3] [--starts 5] [--out DIR]

Writes one dated JSON with hardware, versions and load, and its plot (needs matplotlib), into ``benchmarks/results``. Run
it on a quiet machine: what other processes took meanwhile is in the file.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path

from ray_fracbackend.cli import bench
from ray_fracbackend.cli.bench_ranks import OPERATIONS, SIZES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="of one start")
    parser.add_argument("--starts", type=int, default=5, help="of the processes; medians are over all rounds of all")
    parser.add_argument("--tries", type=int, default=8, help="of a case, until other processes leave the machine alone")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    result = bench.measure(
        options.ranks,
        operations=options.operations,
        sizes=options.sizes,
        rounds=options.rounds,
        starts=options.starts,
        tries=options.tries,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"ipc_{datetime.now(timezone.utc):%Y%m%d_%H%M}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(bench.table(result))
    bench.draw(result, path.with_suffix(".png"))
    print(f"written to {path} and beside it")


if __name__ == "__main__":
    main()
