"""A limit on torch's store client, which waits without one for a store that has fallen silent. Runs on the worker.

A wait whose time is over sends a cancellation and then reads the answer, however long that takes (``TCPStore::doWait``), and
other requests have no time at all. Where the cable is pulled, or the process with the store is stopped and its kernel goes
on accepting, that is for ever. Closing the connection is what such a call notices.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from ray_fracbackend.errors import RendezvousError
from ray_fracbackend.rendezvous import bracketed

# Where a process sees its descriptors: Linux, macOS. Windows has no such folder, and its sockets are no descriptors.
_DESCRIPTORS = (Path("/proc/self/fd"), Path("/dev/fd"))


@contextmanager
def limited(address: str, port: int, after_s: float) -> Iterator[None]:
    """Closes this process's connections to a store once a time is over, so that a call on one of them raises an error.

    Not on Windows, where nothing is closed.

    Args:
        address: The store's address, a literal IP.
        port: Its port.
        after_s: Seconds from now.

    Raises:
        RendezvousError: A call was waiting, by the class that the body raised; or the body came to its end after the time,
            with connections that are closed.
    """
    closed: list[int] = []
    timer = threading.Timer(
        min(after_s, threading.TIMEOUT_MAX), lambda: closed.append(close_connections(address, port))
    )
    timer.daemon = True
    timer.start()
    where = f"{bracketed(address)}:{port}"
    try:
        yield
    except RendezvousError as error:
        if any(closed) and isinstance(error.__cause__, dist.DistNetworkError):
            raise type(error)(
                f"still waiting at rank 0's store at {where} after {after_s:.3g} s: rank 0 hangs, the network to it is cut, or "
                "another rank has not come. Look at that process and at the nodes.",
                ranks=error.ranks,
            ) from error
        raise
    finally:
        timer.cancel()
        timer.join()
    if any(closed):
        raise RendezvousError(
            f"the start took longer than {after_s:.3g} s, and the connections to rank 0's store at {where} are closed. Raise "
            "start_timeout_s, or look at the nodes' load."
        )


def close_connections(address: str, port: int) -> int:
    """Shuts down every connection of this process to an address.

    Args:
        address: A literal IP.
        port: The port there.

    Returns:
        How many there were.
    """
    folder = next((folder for folder in _DESCRIPTORS if folder.exists()), None)
    return sum(_close(int(name), address, port) for name in os.listdir(folder)) if folder else 0


def _close(descriptor: int, address: str, port: int) -> bool:
    try:
        # One of our own: the number may mean something else a moment later.
        own = os.dup(descriptor)
    except OSError:
        return False
    try:
        connection = socket.socket(fileno=own)
    except OSError:  # no socket
        os.close(own)
        return False
    with connection, suppress(OSError):  # not connected
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            host, its_port = connection.getpeername()[:2]
            if its_port == port and _plain(host) == _plain(address):
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as it is compared: c10d's sockets see IPv4 peers by mapped addresses."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found
