"""Memory ordering and kernel waiting between processes of x86-64, through CPython and libc.

Used by every rank; imports the standard library only.

A counter is an aligned 8-byte word, which CPython reads and writes in one access. This CPU keeps loads in order, and ordinary
stores too (TSO). So a rank that sees a counter advance may read what it announces, and counters that are stored one after the
other are seen in this order. Two cases need a fence, which is a locked instruction; acquiring a ``threading.Lock`` is one:

* before a counter is stored: the non-temporal stores of a copy routine for large blocks are not in order. libc's
  ``memmove`` ends them with a fence itself, since a release in C++ is an ordinary store on this CPU;
* between storing a counter and reading whether a rank sleeps on it (and vice versa in the sleeping rank), so that no wake-up
  is lost.

CPUs with another order, such as ARM, are refused: nothing here has run on one, and tests on this CPU find no missing fence.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
from collections.abc import Callable

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
# Number of the futex system call; the argument layout below is that of 64-bit Linux.
_FUTEX_SYSCALL = 202


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def ordering_support() -> str | None:
    """Return whether this machine supports ordered access to counters in shared memory.

    Returns:
        None if it does, else the reason in one sentence.
    """
    machine = platform.machine()
    if not sys.platform.startswith("linux"):
        return f"platform {sys.platform!r} has no futex; the ipc backend needs Linux"
    if machine != "x86_64" or sys.maxsize <= 2**32:
        return f"CPU {machine!r}: the ipc backend needs 64-bit x86, whose order of memory accesses it was tested with"
    return None


def make_fence() -> Callable[[], None]:
    """Return the fence of this process; see the module docstring.

    Raises:
        RuntimeError: `ordering_support` returns a reason.
    """
    reason = ordering_support()
    if reason is not None:
        raise RuntimeError(f"No memory ordering: {reason}.")
    lock = threading.Lock()
    acquire, release, new_lock = lock.acquire, lock.release, threading.Lock

    def fence() -> None:
        if acquire(False):
            release()
        else:  # another thread, or code interrupted by a signal handler, holds the lock
            new_lock().acquire()

    return fence


def let_threads_run() -> Callable[[], int]:
    """Return a function that releases the GIL for a moment without giving up the CPU."""
    return ctypes.CDLL(None).getpid


class Futex:
    """Sleep until a 4-byte word in shared memory changes.

    Args:
        base_address: Address at which the shared memory is mapped in this process.
    """

    def __init__(self, base_address: int) -> None:
        self._base = base_address
        # CDLL (not PyDLL): the GIL is released while the thread sleeps.
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    def wait(self, offset: int, expected: int, timeout_s: float) -> None:
        """Sleep while the word at byte `offset` equals the low 32 bits of `expected`, at most `timeout_s` seconds.

        Returns early on a wake-up, a changed word or a signal; the caller must read the word again.
        """
        seconds = int(timeout_s)
        limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
        code = self._syscall(
            ctypes.c_long(_FUTEX_SYSCALL),
            ctypes.c_void_p(self._base + offset),
            ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_uint32(expected & 0xFFFFFFFF),
            ctypes.byref(limit),
            None,
            ctypes.c_int(0),
        )
        if code == -1:
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(number, f"futex wait: {os.strerror(number)}")

    def wake(self, offset: int) -> None:
        """Wake every thread of every process that sleeps on the word at byte `offset`."""
        self._syscall(
            ctypes.c_long(_FUTEX_SYSCALL),
            ctypes.c_void_p(self._base + offset),
            ctypes.c_int(_FUTEX_WAKE),
            ctypes.c_int(0x7FFFFFFF),
            None,
            None,
            ctypes.c_int(0),
        )
