"""Create rank 0's TCPStore before its address is published, and connect every rank to it. Runs on the worker.

If the store were opened later, another process could take the free port in between. Therefore rank 0 opens the store
during the probe, and the start passes it to ``init_process_group``. This also lets the other ranks distinguish a
firewall from a slow rank 0: if an open store does not answer, it is not reachable.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ray_fracbackend.decide.addresses import bracketed
from ray_fracbackend.decide.advice import advise
from ray_fracbackend.decide.error_texts import cause_of, is_address_in_use
from ray_fracbackend.decide.worker_info import ranks_text
from ray_fracbackend.errors import PortInUseError, RendezvousError
from ray_fracbackend.log import logger, slow_logged
from ray_fracbackend.shown import decoded
from ray_fracbackend.worker.state import STATE

_NUM_TRIES = 3
_CONNECTED = "ray_fracbackend/connected"
_PAUSE_S = 0.3
# c10d looks up the name of every peer for its log, so its own connection waits for a name server that does not answer.
_OPEN_S, _SLOW_S = 60.0, 3.0
_CONNECTING = (
    "connecting to rank 0's store took %.0f s, usually because a name server does not answer: correct it, or add the nodes' "
    "addresses to the hosts file"
)
# The largest value that the kernel allows, because all ranks connect at the same time.
_BACKLOG = 4096


def hold_store(port: int | tuple[int, int] | None, one_node: bool = False, wait_s: float = 0.0) -> int:
    """Create the store of a start, and keep it open until ``release_store``. Called on rank 0.

    Args:
        port: The configured port or inclusive range, None for any.
        one_node: Whether all ranks are on this node, so loopback is enough.
        wait_s: Seconds to wait for a configured port that is taken, for example by processes of the previous attempt.

    Returns:
        The store's port.

    Raises:
        PortInUseError: The port, or every port of the range, is taken.
    """
    release_store()
    num_tries = max(_NUM_TRIES, round(wait_s / _PAUSE_S)) if port else _NUM_TRIES
    candidates = range(port[0], port[1] + 1) if isinstance(port, tuple) else [port or 0] * num_tries
    clash = ""
    for number, candidate in enumerate(candidates):
        if number > 0 and not isinstance(port, tuple):
            # This worker's own failed start may hold the port: the frames of its error reference the store.
            gc.collect()
            time.sleep(_PAUSE_S)
        try:
            STATE.store = _open_local(candidate) if one_node else open_store(candidate)
        except (RuntimeError, OSError) as error:
            if not is_address_in_use(error):
                raise
            if not clash and isinstance(port, int):
                logger.info("port %s is taken on rank 0's node: waiting for it, up to %.0f s", port, wait_s)
            clash = cause_of(error)
            continue
        return int(STATE.store.port)
    owner = "Another job may use it"
    if sys.platform == "win32":
        owner += ", or Windows reserves it (netsh interface ipv4 show excludedportrange protocol=tcp)"
    raise PortInUseError(
        f"{f'master_port={port}' if port else 'every port'} is taken on rank 0's node ({clash}).",
        advice=f"{owner}: give a wider range (low, high), or leave master_port out to use any free port.",
        ranks=(0,),
    )


def release_store() -> None:
    """Drop the reference to the store; it stays open while a process group uses it."""
    STATE.store = None


def connect_store(rank: int, world_size: int, address: str, port: int, timeout_s: float, prefix: str) -> PrefixStore:
    """Return rank 0's own store once all ranks have connected; on other ranks a connection to it.

    On Windows torch opens the port itself. If the process still references a store with this port, torch returns that
    store with its keys. Without a prefix a rank of the previous attempt would count as connected.

    Args:
        rank: This worker's rank, of ``world_size``.
        world_size: Number of workers.
        address: Literal IP of rank 0's node, with ``port``.
        port: Port of the store.
        timeout_s: Time limit in seconds; also the store's own timeout.
        prefix: Prefix of the keys, different for each attempt.

    Raises:
        RendezvousError: On rank 0, if ranks have not connected in time; ``ranks`` names them.
        RuntimeError: The connection failed, or rank 0 has no open store.
    """
    timeout = timedelta(seconds=timeout_s)
    if rank > 0:
        with slow_logged(_SLOW_S, _CONNECTING):
            store = PrefixStore(prefix, client(address, port, timeout))
        store.set(f"{_CONNECTED}/{rank}", "")
        return store
    if STATE.store is None:
        raise RuntimeError("rank 0 holds no store open: it was not probed")
    store = PrefixStore(prefix, STATE.store)
    store.set_timeout(timeout)
    keys = [f"{_CONNECTED}/{other}" for other in range(1, world_size)]
    try:
        # If rank 0 continued alone and failed, it would close the store while other ranks are still connecting.
        if keys:
            store.wait(keys, timeout)
    except RuntimeError as error:
        absent = [other for other, key in enumerate(keys, 1) if not store.check([key])]
        if not absent:
            raise
        raise RendezvousError(
            f"{ranks_text(absent)} did not connect to rank 0's store at {bracketed(address)}:{port} within {timeout_s:.3g} s.",
            advice=advise("no answer"),
            ranks=absent,
        ) from error
    return store


def client(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Connect to a store; the timeout is also that of its calls."""
    return TCPStore(address, port, None, False, timeout, wait_for_workers=False, use_libuv=uses_libuv())


def uses_libuv() -> bool:
    """Return whether this process may use libuv for its store: never on Windows, elsewhere as torch reads USE_LIBUV."""
    return sys.platform != "win32" and os.environ.get("USE_LIBUV", "1") == "1"


def _open_local(port: int) -> TCPStore:
    """Open the store on the node's loopback address."""
    try:
        return open_store(port, "127.0.0.1")
    except OSError as error:
        if is_address_in_use(error):
            raise
    return open_store(port, "::1")


def open_store(port: int = 0, host: str | None = None) -> TCPStore:
    """Create a store in this process. It is open as long as it is referenced.

    Args:
        port: Port to listen on, 0 for any free one.
        host: Literal IP to listen on; None for all addresses of this machine, IPv4 and IPv6. On Windows torch accepts
            no socket, so the store always listens on all addresses.

    Raises:
        RuntimeError: The port is taken, on Windows.
        OSError: The port is taken, or ``host`` is not an address of this machine.
    """
    listener = None if sys.platform == "win32" else _listen(port, host)
    if listener is not None:
        port = listener.getsockname()[1]
    elif port == 0:
        # If torch chose a port that an earlier store of this process had, later groups could not find the store by its
        # port.
        with socket.socket() as free:
            free.bind(("", 0))  # without listening, for which the firewall would ask the user
            port = free.getsockname()[1]
    with decoded(), slow_logged(_SLOW_S, _CONNECTING):
        return TCPStore(
            host or "127.0.0.1",
            port,
            None,
            True,
            timedelta(seconds=_OPEN_S),
            wait_for_workers=False,
            # A train function that creates a group from MASTER_ADDR and MASTER_PORT finds this store by its port.
            multi_tenant=True,
            master_listen_fd=listener.detach() if listener else None,
            use_libuv=uses_libuv() and (listener is None or _libuv_takes_sockets()),
        )


def _listen(port: int, host: str | None) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        except OSError as error:  # IPv6 is disabled by sysctl or by rules of a container
            if is_address_in_use(error):
                raise
    family = socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
    return socket.create_server((host or "0.0.0.0", port), family=family, backlog=_BACKLOG)


def _libuv_takes_sockets() -> bool:
    """Return whether a libuv store accepts an open socket: since torch 2.8 (pytorch#150215). Clients work with both."""
    return torch.__version__ >= "2.8"
