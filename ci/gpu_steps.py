"""Steps of the GPU suite, which are commands with time limits, and their results. Standard library only.

Every result is written at once. If the suite is killed, only the rest of the running step is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT

_GRACE_S = 15.0
_TAIL = 4000
# Environment variable of all processes of a step.
_MARK = "GPU_SUITE_STEP"
# Time for the device to release the memory of a step's processes, and the part of it that may be missing.
_MEMORY_S = 20.0
_MEMORY_MIB = 512


@dataclass(kw_only=True)
class Step:
    """One command of the suite.

    Attributes:
        name: Short name, unique in a call.
        command: Program and arguments, run in the project's folder.
        limit_s: Time limit in seconds.
        env: Environment variables besides those of the suite.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Outcome:
    """Result of a step.

    Attributes:
        name: The step's name.
        command: The command that ran.
        limit_s: Time limit in seconds.
        status: ``passed``, ``failed`` or ``timed out``.
        exit_code: Exit code of the command; negative for a signal.
        seconds: Duration.
        counts: For a step with tests the tests by outcome, and the number collected; else the rows, and the rows
            without a result.
        failures: Name and text of each test that failed.
        skips: Name and reason of each test that was skipped.
        output_tail: The end of its output.
        memory_left_mib: Device memory that was not released after it, if this is more than half a gigabyte.
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
    memory_left_mib: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


class Record:
    """Folder of one call: ``rows.jsonl`` with a line for each row and step, and complete logs in one tar.

    Args:
        folder: Path of the folder.
        call: Name of the call; the folder may contain several.
    """

    def __init__(self, folder: Path, call: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._call = folder, call
        self.rows = folder / "rows.jsonl"
        self._tar = folder / f"logs_{call}.tar"
        self._tar.unlink(missing_ok=True)

    def add(self, **row: Any) -> None:
        """Append a row, on a new line even after an unfinished row of a process."""
        is_cut = self.rows.exists() and not self.rows.read_bytes().endswith(b"\n")
        with self.rows.open("a") as file:
            file.write(("\n" if is_cut else "") + json.dumps({"call": self._call, **row}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def begin(self) -> int:
        """Return the position of the rows that follow."""
        return self.rows.stat().st_size if self.rows.exists() else 0

    def rows_since(self, begin: int) -> list[dict[str, Any]]:
        """Read the rows from a position, without an unfinished last line."""
        rows: list[dict[str, Any]] = []
        with self.rows.open() as file:
            file.seek(begin)
            for line in file:
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line))
        return rows

    def log_of(self, step: Step) -> Path:
        """Return the log file of a running step."""
        return self.folder / f"{self._call}_{step.name}.log"

    def keep(self, log: Path) -> None:
        """Move a finished log into the tar: some machines return only few files."""
        with tarfile.open(self._tar, "a") as tar:
            tar.add(log, log.name)
        log.unlink()


def run_step(step: Step, record: Record, left_s: float) -> Outcome:
    """Run one step. Its output goes to a file, so that no process of it can keep a pipe open.

    Args:
        step: What to run.
        record: Receives its rows and its log.
        left_s: Seconds left in the call.
    """
    limit_s = max(1.0, min(step.limit_s, left_s))
    log, mark, used = record.log_of(step), uuid.uuid4().hex, memory_used_mib()
    print(f"--- {step.name}, at most {limit_s:.0f} s", flush=True)
    record.add(step=step.name, event="begins", limit_s=round(limit_s, 1))
    begin, started = record.begin(), time.monotonic()
    own = {"BENCHMARK_ROWS": str(record.rows), "GPU_SUITE_NAME": step.name, _MARK: mark}
    with log.open("w") as file:
        process = subprocess.Popen(
            list(step.command),
            cwd=ROOT,
            env={**os.environ, **step.env, **own},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = _wait(process, limit_s)
    _kill_all(mark)
    outcome = Outcome(
        name=step.name,
        command=list(step.command),
        limit_s=limit_s,
        status="timed out" if timed_out else "failed" if process.returncode else "passed",
        exit_code=process.returncode,
        seconds=round(time.monotonic() - started, 1),
        output_tail=log.read_text(errors="replace")[-_TAIL:],
        memory_left_mib=_memory_left_mib(used),
    )
    _read_rows(record, outcome, begin)
    record.add(step=step.name, event="ended", **{key: value for key, value in asdict(outcome).items() if key != "name"})
    record.keep(log)
    print(f"--- {step.name}: {outcome.status} after {outcome.seconds:.0f} s {outcome.counts or ''}", flush=True)
    return outcome


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a step; after its time limit end it by a signal first, so it can still report its results."""
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


def _kill_all(mark: str) -> None:
    """Kill every process that a step has left, in any session: it would keep its device memory."""
    for found in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (found / "environ").read_bytes().split(b"\0"):
                os.kill(int(found.name), signal.SIGKILL)


def memory_used_mib() -> int | None:
    """Return the memory in use on all devices by all processes; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(subprocess.SubprocessError, ValueError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return sum(map(int, done.stdout.split()))
    return None


def _memory_left_mib(before: int | None) -> int | None:
    """Wait until the device has released the memory of a step; return what is missing, None if it is little."""
    end = time.monotonic() + _MEMORY_S
    while before is not None and (now := memory_used_mib()) is not None and now - before > _MEMORY_MIB:
        if time.monotonic() > end:
            return now - before
        time.sleep(0.5)
    return None


def _read_rows(record: Record, outcome: Outcome, begin: int) -> None:
    """Read the rows of a step; tests/gpu/conftest.py writes one per test, because a crash would lose a report."""
    for row in record.rows_since(begin):
        if "script" in row and "test" not in row and "num_collected" not in row:
            kind = "failed rows" if "failed" in row else "rows"
            outcome.counts[kind] = outcome.counts.get(kind, 0) + 1
        if "num_collected" in row:
            outcome.counts["collected"] = row["num_collected"]
        elif "test" in row:
            outcome.counts[row["outcome"]] = outcome.counts.get(row["outcome"], 0) + 1
            if row["outcome"] != "passed":
                tests = outcome.failures if row["outcome"] == "failed" else outcome.skips
                tests.append({"test": row["test"], "text": row["text"]})
