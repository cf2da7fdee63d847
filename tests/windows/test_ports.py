"""Binding a port that is in use, the errors of c10d's store and ours, and refused connections."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from ray_fracbackend.decide.error_texts import is_address_in_use
from ray_fracbackend.errors import PortInUseError, UnreachableMasterError
from ray_fracbackend.worker.reach import check_reachable
from ray_fracbackend.worker.store import hold_store, release_store
from tests.processes import free_port, under_wine

pytestmark = pytest.mark.windows(reason="Winsock's rules for ports")

IN_USE, DENIED = 10048, 10013
ONE, ALL = "127.0.0.1", "0.0.0.0"
_OPTIONS = {"plain": None, "exclusive": "SO_EXCLUSIVEADDRUSE", "reuse": "SO_REUSEADDR"}


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release_store()


def bound(kind: str, host: str, port: int = 0) -> socket.socket:
    listener = socket.socket()
    try:
        if option := _OPTIONS[kind]:
            listener.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


@pytest.mark.parametrize("kind", _OPTIONS)
def test_the_held_store_keeps_all_others_out(kind: str) -> None:
    """c10d binds exclusively: no other process can bind the port on one address, with any option."""
    port = hold_store(None)
    with pytest.raises(OSError, match="10013"):
        bound(kind, ONE, port)


def store_at(port: int) -> TCPStore:
    return TCPStore(ONE, port, 1, True, timedelta(seconds=60), wait_for_workers=False, use_libuv=False)


@pytest.mark.parametrize("host", [ONE, ALL])
@pytest.mark.parametrize("kind", [*_OPTIONS, "another store"])
def test_the_store_refuses_a_taken_port(kind: str, host: str) -> None:
    """c10d's message contains the system's code, and is_address_in_use detects it; hold_store names the setting."""
    other = store_at(0) if kind == "another store" else None
    with nullcontext() if other is not None else bound(kind, host) as listener:
        port = other.port if other is not None else listener.getsockname()[1]
        with pytest.raises(RuntimeError, match=_refused(port)) as caught:
            store_at(port)
        assert is_address_in_use(caught.value)
        for one_node in (True, False):
            with pytest.raises(PortInUseError, match=f"^master_port={port} is taken on rank 0's node"):
                hold_store(port, one_node)


def _refused(port: int) -> str:
    # Do not check the address before the code: torch 2.13 prints another one if the name server does not answer.
    return (
        "The server socket has failed to listen on any local network address.*"
        rf"\((?:system error|errno): (?:{IN_USE}|{DENIED}) - .*port={port}\b"
    )


@pytest.mark.skipif(under_wine(), reason="Wine: reserves no ports")
def test_a_port_that_windows_reserves() -> None:
    """Ranges of Hyper-V or WSL are refused with 10013 and reported as in use."""
    port = _reserved_port()
    with pytest.raises(PortInUseError, match=f"^master_port={port} is taken.*10013"):
        hold_store(port)


def _reserved_port() -> int:
    command = ["netsh", "interface", "ipv4", "show", "excludedportrange", "protocol=tcp"]
    listed = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.decode(errors="replace")
    # A range with a star was reserved by an administrator, and can be bound explicitly.
    ranges = re.findall(r"^\s*(\d+)\s+(\d+)\s*$", listed, re.MULTILINE)
    if not ranges:
        pytest.skip("Windows reserves no ports here")
    return int(ranges[0][0])


@pytest.mark.parametrize("one_node", [True, False])
def test_the_store_listens_on_all_addresses(one_node: bool) -> None:
    """torch for Windows accepts no open socket, so it cannot listen only on loopback."""
    port = hold_store(None, one_node)
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == port] == ["::"]
    check_reachable("127.0.0.1", port)
    check_reachable("::1", port)


def test_a_refused_connection() -> None:
    """Error 10061, after about two seconds on Windows and at once under Wine."""
    port = free_port()
    with pytest.raises(ConnectionRefusedError, match="10061") as caught:
        socket.create_connection((ONE, port), timeout=20)
    assert caught.value.errno == caught.value.winerror == 10061


def test_a_refused_store_is_reported_as_refused() -> None:
    """On Windows the time limit interrupts the last of several attempts, which has no answer; earlier ones were refused."""
    with pytest.raises(UnreachableMasterError, match=r"within 5 s \(refused: "):
        check_reachable(ONE, free_port())
