"""Environment of the tests' processes, and files that the long programs count as left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import free_port, left_files, mark_processes, run_processes, shared_files, wait_until

_LOCK = threading.Lock()
_HOLD = "import mmap, os; file = open(input(), 'w+b'); file.truncate(9); held = mmap.mmap(file.fileno(), 9); print(1); input()"
# Its parent ends at once, so it is not below this process.
_ORPHAN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-uc', {_HOLD!r}])"


@pytest.fixture
def path() -> Iterator[Path]:
    found = Path("/dev/shm", f"rfb-{os.getpid()}")
    yield found
    found.unlink(missing_ok=True)


def inherited(rank: int, num_processes: int, port: int) -> tuple[bool, str | None]:
    """Return whether the lock is free here, and a variable."""
    return _LOCK.acquire(timeout=1), os.environ.get("RAY_FRACBACKEND_TEST")


def test_processes_inherit_the_environment_and_no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of the parent may hold a lock, such as libc's while it resolves a name: a forked child waited forever."""
    for value in ("a", "b"):
        monkeypatch.setenv("RAY_FRACBACKEND_TEST", value)
        with _LOCK:
            assert run_processes(inherited, 2) == [(True, value)] * 2


@pytest.mark.linux(reason="needs /dev/shm")
@pytest.mark.parametrize("marked", [False, True])
def test_left_files(path: Path, marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file is left if no process or only a process of this program has it mapped, not if another program has."""
    monkeypatch.setenv("RAY_FRACBACKEND_TEST_RUN", "")
    environment = dict(os.environ)
    mark_processes()
    read, write = os.pipe(), os.pipe()
    subprocess.run(
        [sys.executable, "-c", _ORPHAN],
        stdin=read[0],
        stdout=write[1],
        check=True,
        timeout=60,
        env=dict(os.environ) if marked else environment,
    )
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


@pytest.mark.linux(reason="what a bound socket keeps from others is Linux's rule")
def test_a_free_port_stays_reserved():
    """It is taken for all processes except those that set SO_REUSEADDR, such as a store, which can listen there."""
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("", port)) as listener, socket.create_connection(("127.0.0.1", port)):
        listener.accept()[0].close()
