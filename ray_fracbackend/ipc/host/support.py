"""Detect whether processes can share host memory, and which of them. Imports torch and the standard library."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from .. import knobs
from .._torch import HAS_PYTHON_GROUPS
from .arena import create_arena
from .atomics import ordering_support
from .liveness import start_time

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = "/proc/self/ns/pid"


def host_id() -> str:
    """Return a string that is equal exactly for processes that can open each other's memory.

    It consists of boot id, host name and PID namespace.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}/{socket.gethostname()}/{os.readlink(_PID_NAMESPACE)}"
    except OSError:
        return socket.gethostname()


def host_memory_support() -> str | None:
    """Return whether the ipc backend can be used between processes of this machine.

    Fast (well under a millisecond), needs no process group and leaves no files or memory behind.

    Returns:
        None if it can, else the reason in one sentence.
    """
    reason = ordering_support()
    if reason is not None:
        return reason
    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch was built without torch.distributed or without Gloo, which the ipc backend needs"
    if not HAS_PYTHON_GROUPS:
        return f"torch {torch.__version__} does not support process groups written in Python; the ipc backend needs torch 2.7"
    if not hasattr(os, "memfd_create"):
        return "this Python was built without os.memfd_create"
    try:
        start_time(os.getpid())
        os.readlink(_PID_NAMESPACE)
    except OSError as error:
        return f"/proc cannot be read ({error}); the ipc backend needs it to open and monitor peers"
    try:
        _, name = create_arena(knobs.MIN_CHUNK_BYTES)
        try:
            os.close(os.open(f"/proc/self/fd/{name.fd}", os.O_RDWR | os.O_CLOEXEC))
        finally:
            os.close(name.fd)
    except OSError as error:
        return f"the kernel does not provide anonymous shared memory: {error}"
    return None
