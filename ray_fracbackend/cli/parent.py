"""A child process of a command ends with its parent, however that ends. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

# Of the Windows API: the right to wait for a process, and no time limit.
_SYNCHRONIZE, _INFINITE = 0x00100000, 0xFFFFFFFF


def end_with_parent() -> None:
    """Watch the parent in a thread, and end this process with it; on Unix its whole process group, which must be its own.

    On Unix the parent's end is seen on standard input: a pipe whose other end the parent keeps open.
    """
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    if sys.platform == "win32":
        # A thread that reads standard input would hold up every library that looks at it while it loads, torch among them.
        kernel = ctypes.WinDLL("kernel32")
        kernel.OpenProcess.restype = ctypes.c_void_p
        if parent := kernel.OpenProcess(_SYNCHRONIZE, False, os.getppid()):
            kernel.WaitForSingleObject(ctypes.c_void_p(parent), _INFINITE)
            os._exit(1)
        return
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
