"""Runs under random faults for a number of minutes; each must succeed or end in an expected error, in time, and leave nothing.

usage: python -m tests.soak [--minutes N] [--seed S] [--runs N] [--only SEED] [--kind starts|fits] [--out FILE]

There are two kinds: starts in plain processes in network namespaces (root on Linux), and fits of Ray Train, one after a number of starts.
Each run is generated from its own seed: ``--only`` repeats a single run, with the same ``--kind``. Each run is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from net_nodes import Node, network, why_not
from net_nodes import run as run_command

from tests.processes import left_files, mark_processes, shared_files
from tests.soak import fits, starts

KINDS = ("starts", "fits")
# Fits take longer, so both kinds get about the same time.
_STARTS_PER_FIT = 5
# The nodes are created again after this number of runs.
_RUNS_PER_NETWORK = 50
# Time for files of other programs in /dev/shm to disappear.
_VANISH_S = 10.0


class Soak:
    """Run the runs; runs in namespaces use nodes that are created on first use."""

    def __init__(self, seed: int, kinds: Sequence[str]) -> None:
        self._rng, self._kinds = random.Random(seed), kinds
        self._network = ExitStack()
        self._nodes: list[Node] = []
        self._num_runs = 0

    def next_run(self) -> dict[str, Any]:
        """Return the next run of the schedule."""
        turn = self._num_runs % (_STARTS_PER_FIT + 1) == 0
        kind = "fits" if (turn and "fits" in self._kinds) or "starts" not in self._kinds else "starts"
        return self.play(kind, self._rng.randrange(10**9))

    def play(self, kind: str, seed: int) -> dict[str, Any]:
        """Run one run, generated from its seed."""
        rng, before, started = random.Random(seed), shared_files(), time.monotonic()
        self._num_runs += 1
        run = fits.FitRun.random(rng) if kind == "fits" else starts.StartRun.random(rng)
        try:
            found = fits.play(run) if isinstance(run, fits.FitRun) else starts.play(run, self._get_nodes())
        except Exception as error:
            found = {"problems": [f"{type(error).__name__}: {error}"]}
        end = time.monotonic() + _VANISH_S
        while (left := left_files(before)) and time.monotonic() < end:
            time.sleep(0.05)
        found["problems"] += [f"/dev/shm/{name} is left" for name in left]
        seconds = round(time.monotonic() - started, 2)
        return {"kind": kind, "seed": seed, "seconds": seconds, "run": asdict(run), **found}

    def _get_nodes(self) -> list[Node]:
        if self._num_runs % _RUNS_PER_NETWORK == 0:
            self._network.close()
            self._nodes = []
        if not self._nodes:
            self._nodes, _ = self._network.enter_context(network(starts.NUM_NODES))
        return self._nodes

    def close(self) -> list[str]:
        """Remove the nodes; return those that are left."""
        self._network.close()
        if "starts" not in self._kinds:
            return []
        return [name for name in run_command("ip", "netns", "list").split() if name.startswith(f"rfb-{os.getpid()}-")]


def arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    found.add_argument("--minutes", type=float, default=30)
    found.add_argument("--runs", type=int, help="end after so many runs")
    found.add_argument("--seed", type=int, default=random.randrange(10**6), help="seed of the schedule")
    found.add_argument("--kind", choices=KINDS, help="runs of this kind alone")
    found.add_argument("--only", type=int, metavar="SEED", help="repeat the run with this seed; needs --kind")
    found.add_argument("--out", type=Path, help="file for one JSON line a run")
    options = found.parse_args()
    if options.only is not None and options.kind is None:
        found.error("--only needs --kind")
    return options


def main() -> None:
    options = arguments()
    kinds = [options.kind] if options.kind else list(KINDS)
    if "starts" in kinds and (reason := why_not()):
        print(f"without starts in namespaces: {reason}", flush=True)
        kinds.remove("starts")
    if not kinds:
        raise SystemExit(1)
    # If it is ended from outside, it still removes its nodes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    mark_processes()
    soak = Soak(options.seed, kinds)
    end = time.monotonic() + 60 * options.minutes
    most = 1 if options.only is not None else options.runs
    count: Counter[str] = Counter()
    try:
        while time.monotonic() < end and (most is None or sum(count[kind] for kind in KINDS) < most):
            found = soak.play(options.kind, options.only) if options.only is not None else soak.next_run()
            count[found["kind"]] += 1
            count["problems"] += bool(found["problems"])
            line = json.dumps(found)
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(line + "\n")
    finally:
        left = soak.close()
    print(f"seed {options.seed}: {dict(count)}", *(f"namespace {name} is left" for name in left))
    raise SystemExit(bool(count["problems"] or left))


if __name__ == "__main__":
    main()
