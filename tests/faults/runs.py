"""Run cases in separate drivers with time limits, and check the answers."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tests.faults.cases import HIDING_HOOKS, PACKAGES, STEPS, Case
from tests.faults.planted import FAULT, told_at

_ROOT = Path(__file__).parents[2]
# Maximum wait of a user in our start beyond start_timeout_s.
SLACK_S = 10.0
# Tolerance for a busy machine.
_PATIENCE_S = 120.0
_POLL_S = 0.5
# V2's error for a lost worker after the last restart; the start's own is its cause, which the driver does not receive (2.60).
_RAYS_OWN = "WorkerGroupStartupFailedError"
# Characters of a message that tell it from others.
_TELLING = 60


class Driver:
    """A driver process with its own Ray; close() kills it with all its processes."""

    def __init__(self, engine: str, ray: str, timeout_s: float) -> None:
        self.ray = ray
        self._timeout_s = timeout_s
        # Ray adds the driver's current directory to the path of each worker.
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.driver", ray],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._folder.name,
            env={
                **os.environ,
                "PYTHONPATH": str(_ROOT),
                # V2's PlacementGroupCleaner asks the cluster that this folder names: another one would let each fit end 12 s later.
                "RAY_TMPDIR": self._folder.name,
                # How long V2 waits for the CPUs of a lost node before it tries a smaller group.
                "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
                "RAY_TRAIN_V2_ENABLED": "0" if engine == "V1" else "1",
                "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": str(round(timeout_s)),
            },
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._gave_up = False
        self._answer(_PATIENCE_S)

    @property
    def is_alive(self) -> bool:
        """Whether it can run another case."""
        return not self._gave_up and self._process.poll() is None

    def run(self, case: Case, limit_s: float) -> dict[str, Any] | None:
        """Return the user's view and what was left, None if the fit did not end ``limit_s`` after the fault."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            task = {"case": asdict(case), "timeout_s": self._timeout_s, "folder": folder}
            print(json.dumps(task), file=self._process.stdin, flush=True)
            # A busy machine may take long to reach the fault.
            end = time.monotonic() + 2 * _PATIENCE_S
            while (seen := self._answer(_POLL_S)) is None:
                struck = told_at(folder, FAULT)
                if time.monotonic() > end or (struck is not None and time.time() > struck + limit_s):
                    self._gave_up = True
                    return None
            return {**seen, **(self._answer(_PATIENCE_S) or {})}

    def _answer(self, limit_s: float) -> Any:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            return None
        return json.loads(line) if line else {"left": [f"the driver ended, exit code {self._process.wait()}"]}

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            self._lines.put(line)
        self._lines.put("")

    def close(self) -> None:
        """Kill the driver and its processes, including stopped ones, which would outlive their Ray."""
        process = psutil.Process(self._process.pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self._process.wait()
        self._reader.join()
        self._folder.cleanup()


def run_cases(
    cases: Sequence[Case], engine: str, timeout_s: float, limit_s: float
) -> Iterator[tuple[Case, dict[str, Any] | None]]:
    """Run the cases that the engine can have, one after the other.

    After one that did not end, left something or lost a node, the next one gets a new driver.
    """
    driver = None
    try:
        for case in cases:
            if case.why_not(engine) is not None:
                continue
            if driver is None or driver.ray != case.ray:
                if driver is not None:
                    driver.close()
                driver = Driver(engine, case.ray, timeout_s)
            answer = driver.run(case, limit_s)
            yield case, answer
            # The left processes hold CPUs that the next case needs.
            if not driver.is_alive or (answer or {}).get("left") or case.fault == "node":
                driver.close()
                driver = None
    finally:
        if driver is not None:
            driver.close()


def problems(case: Case, engine: str, seen: dict[str, Any] | None, timeout_s: float) -> list[str]:
    """Return what is wrong with the end of a case."""
    if seen is None:
        return ["no end"]
    if "starts" not in seen:
        return list(seen["left"])
    if not case.fault or (not seen["starts"] and (case.hook or case.fault == "no package")):
        return []  # it ended in Ray, before our start or after it
    found = [f"left: {name}" for name in seen["left"]]
    if case.step not in STEPS:
        return found
    if seen["starts"] - case.is_repeated != case.num_starts(engine):
        found.append(f"{seen['starts']} starts")
    if seen["start_s"] is not None and seen["start_s"] > timeout_s + SLACK_S:
        found.append("too late")
    if case.ends_well(engine):
        return found + ([f"not trained: {seen['error']}"] if seen["error"] else [])
    return found + _in_the_error(case, seen)


def _in_the_error(case: Case, seen: dict[str, Any]) -> list[str]:
    """Return what is wrong with the error of a failed start, its report and Ray's record."""
    error, report, found = seen["error"], seen["report"] or {}, []
    if error is None:
        return ["no error"]
    if case.hook in HIDING_HOOKS or error["cause_class"] == _RAYS_OWN:
        error = {**report, "cause": report.get("message", "no report"), "ranks": report.get("ranks")}
    culprits = [0] if case.fault == "port" else [0, 1] if case.fault == "device" else sorted(set(seen["struck"]))
    if error["ranks"] is None:
        found.append(f"not ours: {error['cause']}")
    elif error["ranks"] != culprits and case.fault not in ("memory", *PACKAGES):
        found.append(f"names ranks {error['ranks']}: {error['cause']}")
    if report.get("message", "")[:_TELLING] != error["cause"][:_TELLING]:
        found.append("the report does not name the error")
    if seen["again"] is not None:
        found.append(f"the second run failed: {seen['again']}")
    recorded = seen["attempts"] or []
    if any(status != "ERRORED" or error["cause"][:_TELLING] not in detail for status, detail in recorded):
        found.append(f"Ray's record: {recorded}")
    return found
