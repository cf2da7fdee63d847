"""Check whether a peer process is alive. Imports the standard library, and psutil where there is no /proc."""

from __future__ import annotations

import sys
from pathlib import Path

_HAS_PROC = sys.platform.startswith("linux")


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may hold spaces: split after the last parenthesis.
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> float:
    """Return the start time of process `pid`, to detect a reused pid. The unit depends on the system.

    Raises:
        ProcessLookupError: There is no such process.
    """
    if not _HAS_PROC:
        import psutil

        try:
            return float(psutil.Process(pid).create_time())
        except psutil.Error as error:
            raise ProcessLookupError(f"no process {pid}") from error
    fields = _stat_fields(pid)
    if fields is None:
        raise ProcessLookupError(f"no process {pid}")
    return int(fields[19])


class Peer:
    """One process of this machine. A later process with the same pid, or program in it, does not count as this one.

    Args:
        pid: Its pid in this PID namespace.
        started: Its `start_time`.
    """

    def __init__(self, pid: int, started: float) -> None:
        self.pid = int(pid)
        self.started = started
        fields = _stat_fields(pid) if _HAS_PROC else None
        # Where its stack begins, which changes if it replaces its program by exec; 0 where the kernel does not tell.
        self._stack = int(fields[25]) if fields else 0

    def is_alive(self) -> bool:
        """Return False once all threads of the process have ended, even if its parent has not yet waited for it."""
        return self.state() != "gone"

    def state(self) -> str:
        """Return "running", "stopped" or "gone"; without /proc a stopped process counts as running."""
        if not _HAS_PROC:
            try:
                return "running" if start_time(self.pid) == self.started else "gone"
            except ProcessLookupError:
                return "gone"
        fields = _stat_fields(self.pid)
        if fields is None or int(fields[19]) != self.started:
            return "gone"
        if self._stack and int(fields[25]) not in (0, self._stack):
            return "gone"
        if fields[0] in ("Z", "X"):
            # This is the state of the main thread. Until the last thread ends, the process keeps its memory and files.
            return "running" if int(fields[17]) > 1 else "gone"
        return "stopped" if fields[0] in ("T", "t") else "running"
