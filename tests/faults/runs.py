"""Run cells of fault, phase and configuration in separate drivers with time limits, and check the answers."""

from __future__ import annotations

import json
import os
import queue
import re
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

from tests.faults.planted import FAULT, FAULTS, Planting, told_at

_ROOT = Path(__file__).parents[2]
START_PHASES = ("probe", "rendezvous", "init", "verify")
PHASES = (*START_PHASES, "train", "shutdown")
# Maximum wait of a user in our start beyond start_timeout_s.
SLACK_S = 10.0
# Tolerance for a busy machine.
_PATIENCE_S = 120.0
_POLL_S = 0.5
_NOTHING = {"on_start_s": None, "start_s": None, "fault_s": None}


def plantings() -> list[Planting]:
    """Return every cell of one engine."""
    rows = [(phase, fault) for phase in PHASES for fault in FAULTS if fault != "wrong" or phase == "verify"]
    found = [Planting("ours", backend, *row) for backend in ("gloo", "ipc") for row in rows]
    # Stock has neither a probe nor a verification.
    return found + [Planting("stock", "gloo", *row) for row in rows if row[0] not in ("probe", "verify")]


class Driver:
    """A driver process with its own Ray; close() kills it with all its processes."""

    def __init__(self, engine: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(_ROOT),
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
        """Whether it can run another cell."""
        return not self._gave_up and self._process.poll() is None

    def run(self, planting: Planting, limit_s: float) -> dict[str, Any] | None:
        """Return the user's view and what was left, None if the fit did not end ``limit_s`` after the fault."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            task = {"planting": asdict(planting), "timeout_s": self._timeout_s, "folder": folder}
            print(json.dumps(task), file=self._process.stdin, flush=True)
            # A busy machine may take long to reach the fault.
            end = time.monotonic() + 2 * _PATIENCE_S
            while (seen := self._answer(_POLL_S)) is None:
                struck = told_at(folder, FAULT)
                if time.monotonic() > end or (struck is not None and time.time() > struck + limit_s):
                    self._gave_up = True
                    return None
            return {**_NOTHING, **seen, **(self._answer(_PATIENCE_S) or {})}

    def _answer(self, limit_s: float) -> Any:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            return None
        if not line:
            return {"error": {"cause_class": "DriverEnded", "cause": f"exit code {self._process.wait()}"}}
        return json.loads(line)

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


def run_cells(
    cells: Sequence[Planting], engine: str, timeout_s: float, limit_s: float
) -> Iterator[tuple[Planting, dict[str, Any] | None]]:
    """Run cells one after the other; after one that did not end or left something, the next one gets a new driver."""
    driver = None
    try:
        for planting in cells:
            driver = driver or Driver(engine, timeout_s)
            answer = driver.run(planting, limit_s)
            yield planting, answer
            # The left processes hold CPUs that the next cell needs.
            if not driver.is_alive or (answer or {}).get("left"):
                driver.close()
                driver = None
    finally:
        if driver is not None:
            driver.close()


def problems(planting: Planting, answer: dict[str, Any] | None) -> list[str]:
    """Return the problems of one of our cells, except its duration."""
    if answer is None:
        return ["no end"]
    found = [f"left: {name}" for name in answer.get("left", ["no word of it"])]
    if answer["fault_s"] is None:
        found.append("the fault did not strike")
    error = answer["error"]
    if error is None:
        return found
    if planting.phase in START_PHASES and not is_named(planting, error):
        found.append(f"the rank is not named: {error['cause_class']}: {error['cause']}")
    return found


def is_named(planting: Planting, error: dict[str, str]) -> bool:
    """Return whether the error names the rank."""
    return re.search(rf"\brank {planting.rank}\b", error["cause"], re.IGNORECASE) is not None


def too_late(planting: Planting, answer: dict[str, Any] | None, timeout_s: float) -> bool:
    """Return whether one of our starts took too long to fail, including Ray's shutdown."""
    if planting.phase not in START_PHASES:
        return False
    if answer is None or answer["on_start_s"] is None:
        return True
    # If Ray restarts the workers, the failed start counts.
    return bool(answer["on_start_s" if answer["error"] is None else "start_s"] > timeout_s + SLACK_S)
