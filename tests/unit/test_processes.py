"""Files that the long programs count as left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import left_files, mark_processes, shared_files, wait_until

_HOLD = "import mmap, os; file = open(input(), 'w+b'); file.truncate(9); held = mmap.mmap(file.fileno(), 9); print(1); input()"
# Its parent ends at once, so it is not below this process.
_ORPHAN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-uc', {_HOLD!r}])"


@pytest.fixture
def path() -> Iterator[Path]:
    found = Path("/dev/shm", f"rfb-{os.getpid()}")
    yield found
    found.unlink(missing_ok=True)


@pytest.mark.linux(reason="needs /dev/shm")
@pytest.mark.parametrize("marked", [False, True])
def test_left_files(path: Path, marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file is left if no process or only a process of this program has it mapped, not if another program has."""
    monkeypatch.setenv("RAY_FRACBACKEND_TEST_RUN", "")
    environment = dict(os.environ)
    mark_processes()
    read, write = os.pipe(), os.pipe()
    env = dict(os.environ) if marked else environment
    command = [sys.executable, "-c", _ORPHAN]
    subprocess.run(command, stdin=read[0], stdout=write[1], check=True, timeout=60, env=env)
    try:
        before = shared_files()
        os.write(read[1], f"{path}\n".encode())
        assert os.read(write[0], 1) == b"1"
        assert (path.name in left_files(before)) is marked
        os.write(read[1], b"\n")
        assert wait_until(lambda: path.name in left_files(before))
    finally:
        for descriptor in (*read, *write):
            os.close(descriptor)
