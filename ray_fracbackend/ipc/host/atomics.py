"""Memory ordering and kernel waiting between processes, from libc and libatomic through ctypes.

Used by every rank; imports the standard library only.

A counter is an aligned 8-byte word, which CPython reads and writes in one access. Fences add the order:

* ``release`` before a counter is stored: the data that it announces becomes visible first;
* ``acquire`` after a counter was seen to advance: the data is not read too early;
* ``full`` between storing a counter and reading whether a rank sleeps on it (and vice versa in the sleeping rank): no
  wake-up is lost;
* ``store`` between the stores of two counters, and of a counter after the copy of its data by libc's ``memmove``.

On x86-64 loads stay in order, so ``acquire`` needs no instruction. ``full`` needs a locked instruction; acquiring a
``threading.Lock`` is one. ``release`` uses it too: ordinary stores stay in order (TSO), but the non-temporal stores of
a copy routine for large blocks do not. ``store`` needs no instruction: counters are written by ordinary stores, and
``memmove`` ends its non-temporal stores with a fence, since a release in C++ is an ordinary store on this CPU.
Other CPUs use libatomic's ``atomic_thread_fence`` for all four; without libatomic they are not supported.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_SEQ_CST = 5  # memory_order_seq_cst of <stdatomic.h>
# Number of the futex system call; the argument layout below is that of 64-bit Linux.
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}


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
    if machine not in _FUTEX_SYSCALL or sys.byteorder != "little" or sys.maxsize <= 2**32:
        return f"CPU {machine!r} is not one of 64-bit {sorted(_FUTEX_SYSCALL)}"
    if machine != "x86_64" and _libatomic_fence() is None:
        return f"CPU {machine!r} is weakly ordered and libatomic.so.1 (package libatomic1) is not installed"
    return None


def _libatomic_fence() -> Callable[[], None] | None:
    try:
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    fence.argtypes = [ctypes.c_int]
    fence.restype = None
    return lambda: fence(_SEQ_CST)


def _no_fence() -> None:
    """Do nothing: on x86-64 loads are not reordered, nor are stores."""


def _locked_fence() -> Callable[[], None]:
    lock = threading.Lock()
    acquire, release, new_lock = lock.acquire, lock.release, threading.Lock

    def fence() -> None:
        if acquire(False):
            release()
        else:  # another thread, or code interrupted by a signal handler, holds the lock
            new_lock().acquire()

    return fence


@dataclass(frozen=True)
class Fences:
    """The four fences of this process; see the module docstring."""

    release: Callable[[], None]
    acquire: Callable[[], None]
    full: Callable[[], None]
    store: Callable[[], None]


def make_fences() -> Fences:
    """Return the fences of this CPU.

    Raises:
        RuntimeError: `ordering_support` returns a reason.
    """
    reason = ordering_support()
    if reason is not None:
        raise RuntimeError(f"No memory ordering: {reason}.")
    if platform.machine() == "x86_64":
        fence = _locked_fence()
        return Fences(release=fence, acquire=_no_fence, full=fence, store=_no_fence)
    atomic_fence = _libatomic_fence()
    assert atomic_fence is not None
    return Fences(atomic_fence, atomic_fence, atomic_fence, atomic_fence)


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
        self._number = _FUTEX_SYSCALL[platform.machine()]
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
            ctypes.c_long(self._number),
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
            ctypes.c_long(self._number),
            ctypes.c_void_p(self._base + offset),
            ctypes.c_int(_FUTEX_WAKE),
            ctypes.c_int(0x7FFFFFFF),
            None,
            None,
            ctypes.c_int(0),
        )
