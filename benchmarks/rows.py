"""Rows of a benchmark, written as they are found. Standard library only."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from pathlib import Path
from typing import Any

_ROWS = "BENCHMARK_ROWS"


class Rows:
    """Rows of one script, in a file that all its processes append to as they find them: a process that dies loses none.

    The file is that of the environment variable ``BENCHMARK_ROWS``, else a temporary one.

    Args:
        script: Name that the rows carry.
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
        """All rows of this script since this object was made, of all processes."""
        with open(os.environ[_ROWS]) as file:
            file.seek(self._begin)
            found = [json.loads(line) for line in file]
        return [
            {key: value for key, value in row.items() if key != "script"}
            for row in found
            if row.get("script") == self._script
        ]


def add_row(script: str, row: dict[str, Any]) -> None:
    """Print a row and append it to the file of `Rows`; in a process that one with such an object has started."""
    line = json.dumps({"script": script, **row}) + "\n"
    print(line, end="", flush=True)
    # One write at the end of the file, so that lines of several processes do not mix.
    file = os.open(os.environ[_ROWS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)
