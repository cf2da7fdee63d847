"""Steps of the GPU suite: commands with a time limit each, and what became of them. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT

_GRACE_S = 15.0
_TAIL = 4000
_COLLECTED = re.compile(r"^=*\s*(\d+)(?:/\d+)? tests? collected", re.MULTILINE)


@dataclass(kw_only=True)
class Step:
    """One command of the suite.

    Attributes:
        name: Short name, unique in the suite.
        command: Program and arguments, run in the project's folder.
        limit_s: Seconds after which it is ended.
        env: Variables beside those of the suite.
        junit: Where it leaves a report of its tests, None where it has none.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    junit: Path | None = None


@dataclass(kw_only=True)
class Outcome:
    """What became of a step.

    Attributes:
        name: The step's name.
        command: As it was run.
        limit_s: Its limit in seconds.
        status: ``passed``, ``failed`` or ``timed out``.
        exit_code: Of the command; negative for a signal.
        seconds: How long it took.
        counts: Tests by outcome, where the step has tests.
        failures: Name and text of each test that failed.
        skips: Name and reason of each test that was skipped.
        output_tail: The last of what it printed.
    """

    name: str
    command: list[str]
    limit_s: float
    status: str
    exit_code: int | None
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    skips: list[dict[str, str]] = field(default_factory=list)
    output_tail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def run_together(steps: Sequence[Step], folder: Path, left_s: float) -> list[Outcome]:
    """Runs steps side by side, each within its limit and the time that is left."""
    with ThreadPoolExecutor(max_workers=max(1, len(steps))) as pool:
        return list(pool.map(lambda step: run_step(step, folder, left_s), steps))


def run_step(step: Step, folder: Path, left_s: float) -> Outcome:
    """Runs one step; its output goes to a file, so that no process of it can keep a pipe open.

    Args:
        step: What to run.
        folder: For its output.
        left_s: Seconds that the suite has left.
    """
    limit_s = max(1.0, min(step.limit_s, left_s))
    log = folder / f"{step.name}.log"
    print(f"--- {step.name}, at most {limit_s:.0f} s", flush=True)
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            list(step.command),
            cwd=ROOT,
            env={**os.environ, **step.env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = _wait(process, limit_s)
    status = "timed out" if timed_out else "failed" if process.returncode else "passed"
    outcome = Outcome(
        name=step.name,
        command=list(step.command),
        limit_s=limit_s,
        status=status,
        exit_code=process.returncode,
        seconds=round(time.monotonic() - started, 1),
        output_tail=log.read_text(errors="replace")[-_TAIL:],
    )
    if step.junit is not None:
        _read_junit(step.junit, outcome)
    print(f"--- {step.name}: {outcome.status} after {outcome.seconds:.0f} s {outcome.counts or ''}", flush=True)
    return outcome


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait, and end what takes longer: by a signal first, so that it can end its own processes and report its results."""
    try:
        process.wait(timeout=limit_s)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def _read_junit(path: Path, outcome: Outcome) -> None:
    collected = _COLLECTED.search(outcome.output_tail)
    if collected:  # the tests were not run
        outcome.counts = {"collected": int(collected.group(1))}
        return
    if not path.is_file():
        return
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((found for tag in ("failure", "error") if (found := case.find(tag)) is not None), None)
        skipped = case.find("skipped")
        if bad is not None:
            counts["failed"] += 1
            outcome.failures.append({"test": name, "text": f"{bad.get('message')}\n{bad.text or ''}"[-_TAIL:]})
        elif skipped is not None:
            counts["skipped"] += 1
            outcome.skips.append({"test": name, "reason": str(skipped.get("message"))})
        else:
            counts["passed"] += 1
    outcome.counts = counts
