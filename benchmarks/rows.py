"""Rows of a benchmark, written as soon as they are measured. Standard library only."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_ROWS = "BENCHMARK_ROWS"


class Rows:
    """Rows of one script, in a file to which all its processes append; a process that dies loses no row.

    The environment variable ``BENCHMARK_ROWS`` names the file; by default it is a temporary one.

    Args:
        script: Name of the script in the rows.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        if _ROWS not in os.environ:
            file, os.environ[_ROWS] = tempfile.mkstemp(prefix="benchmark-rows-", suffix=".jsonl")
            os.close(file)
            atexit.register(os.unlink, os.environ[_ROWS])
        path = Path(os.environ[_ROWS])
        self._begin = path.stat().st_size if path.exists() else 0

    def add(self, **row: Any) -> None:
        """Print a row and append it."""
        add_row(self._script, row)

    def read(self) -> list[dict[str, Any]]:
        """Return all rows of this script from all processes, since this object was created."""
        with open(os.environ[_ROWS]) as file:
            file.seek(self._begin)
            found = [json.loads(line) for line in file]
        return [
            {key: value for key, value in row.items() if key != "script"}
            for row in found
            if row.get("script") == self._script
        ]


def add_row(script: str, row: dict[str, Any]) -> None:
    """Print a row and append it to the file of `Rows`, in a process started by one that has a `Rows` object."""
    line = json.dumps({"script": script, **row}) + "\n"
    print(line, end="", flush=True)
    # A single write at the end of the file, so that lines of several processes do not mix.
    file = os.open(os.environ[_ROWS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def gpu_state() -> str:
    """Return memory and state of the GPUs and the driver's latest errors (Xid), for after a process was killed."""
    command = (
        "nvidia-smi --query-gpu=memory.used,pstate,utilization.gpu --format=csv,noheader; dmesg | grep -i xid | tail -3"
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20, check=False)
        return (done.stdout + done.stderr).strip()[-1000:]
    return "nvidia-smi did not end"
