"""Anonymous shared memory between processes of one host: creation, attachment, size.

The memory is a memfd. It has no name in any file system, so a killed rank leaves nothing in /dev/shm. It is not limited
by the size of /dev/shm (64 MB in a Docker container). Only processes that may read ``/proc/<creator>/fd`` (the same
user, or root) can open it, and they open nothing else there. ``fallocate`` allocates all pages before their first use and a
seal forbids shrinking, so no access can raise SIGBUS. A page is on the NUMA node of the process that allocates it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from dataclasses import dataclass

from ..errors import IpcUnavailableError

TOKEN_BYTES = 16
_PAGE_BYTES = 4096
_NAME = "ray_fracbackend_ipc"
_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL of memfd_create(2); with vm.memfd_noexec=2 the kernel refuses memory without it


@dataclass(frozen=True)
class ArenaName:
    """Data with which another process opens an arena.

    Attributes:
        pid: Process that created it and keeps `fd` open until every rank has attached.
        fd: Descriptor number in that process.
        token: Random hex text, also stored in the memory. Detects that the pid or fd now belongs to something else.
        num_bytes: Size of the memory.
    """

    pid: int
    fd: int
    token: str
    num_bytes: int


class Arena:
    """A shared mapping.

    Attributes:
        fd: Descriptor, which the caller closes.
        memory: The mapping; its first `TOKEN_BYTES` bytes are the token.
        address: Address of the mapping in this process.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.memory = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def create_arena(num_bytes: int, first_bytes: int | None = None) -> tuple[Arena, ArenaName]:
    """Create shared memory, whose descriptor must stay open until all peers have attached.

    Args:
        num_bytes: Its size.
        first_bytes: How much of it to allocate; None for all. The users allocate the rest with ``posix_fallocate``.

    Raises:
        OSError: The kernel cannot create a memfd or allocate `num_bytes`.
    """
    import fcntl  # does not exist on Windows, where this module must still be importable

    num_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(_NAME, flags | _NOEXEC_SEAL)
    except OSError:  # before Linux 6.3
        fd = os.memfd_create(_NAME, flags)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes if first_bytes is None else first_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        arena = Arena(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    token = secrets.token_bytes(TOKEN_BYTES)
    arena.memory[:TOKEN_BYTES] = token
    return arena, ArenaName(os.getpid(), fd, token.hex(), num_bytes)


def attach_arena(name: ArenaName) -> Arena:
    """Map memory that another process created.

    Raises:
        IpcUnavailableError: This process cannot open the creator's descriptor, or it is not the announced memory.
    """
    import fcntl

    path = f"/proc/{name.pid}/fd/{name.fd}"
    wrong = f"{path} is not the announced memory: its process has ended."
    try:
        if os.readlink(path) != f"/memfd:{_NAME} (deleted)":
            raise IpcUnavailableError(wrong)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise IpcUnavailableError(
            f"{path} of the rank that created the memory cannot be opened ({error.strerror}): both ranks must share a "
            f"PID namespace and a user. Use the gloo backend."
        ) from error
    try:
        found, seals = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        # Root could open the memory of any user.
        if (found.st_uid, found.st_size) != (os.geteuid(), name.num_bytes) or not seals & fcntl.F_SEAL_SHRINK:
            raise IpcUnavailableError(wrong)
        arena = Arena(fd, name.num_bytes)
        if arena.memory[:TOKEN_BYTES].hex() != name.token:
            raise IpcUnavailableError(wrong)
    except BaseException:
        os.close(fd)
        raise
    return arena
