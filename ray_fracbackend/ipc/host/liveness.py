"""Is a peer process still there? Runs in every rank; imports the standard library, and psutil where there is no /proc."""

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
    """Return the start of process `pid`, which distinguishes processes of the same number; in what unit is the system's affair.

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
    """One process of this machine, distinguished from later ones with the same number.

    Args:
        pid: Its process number in this PID namespace.
        started: Its `start_time`.
    """

    def __init__(self, pid: int, started: float) -> None:
        self.pid = pid
        self.started = started

    def is_alive(self) -> bool:
        """Return False once the process has ended with all its threads, also while its parent has not yet waited for it."""
        return self.state() != "gone"

    def state(self) -> str:
        """Return the state for messages: "running", "stopped" or "gone"; without /proc a stopped process counts as running."""
        if not _HAS_PROC:
            try:
                return "running" if start_time(self.pid) == self.started else "gone"
            except ProcessLookupError:
                return "gone"
        fields = _stat_fields(self.pid)
        if fields is None or int(fields[19]) != self.started:
            return "gone"
        if fields[0] in ("Z", "X"):
            # The state is that of the first thread. While another one is still ending, the memory and the files of the process are there.
            return "running" if int(fields[17]) > 1 else "gone"
        return "stopped" if fields[0] in ("T", "t") else "running"
