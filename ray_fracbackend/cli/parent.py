"""End a child process of a command when its parent ends, for any reason. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

# Constants of the Windows API: the right to wait for a process, and no time limit.
_SYNCHRONIZE, _INFINITE = 0x00100000, 0xFFFFFFFF


def end_with_parent(pid: int) -> None:
    """Watch the parent in a thread, and end this process when the parent ends; on Unix its whole process group, which it must lead.

    On Unix standard input shows the parent's end: it is a pipe whose other end the parent keeps open.

    Args:
        pid: The parent, for Windows. ``os.getppid()`` would be the redirector of a virtual environment, which ends only after this process.
    """
    threading.Thread(target=_watch, args=(pid,), daemon=True).start()


def _watch(pid: int) -> None:
    if sys.platform == "win32":
        # A thread that reads standard input would block every library that accesses it while it loads, such as torch.
        kernel = ctypes.WinDLL("kernel32")
        kernel.OpenProcess.restype = ctypes.c_void_p
        if parent := kernel.OpenProcess(_SYNCHRONIZE, False, pid):  # else it has ended
            kernel.WaitForSingleObject(ctypes.c_void_p(parent), _INFINITE)
        os._exit(1)
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
