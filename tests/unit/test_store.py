"""Rank 0's store on this machine's loopback: ports, ranges, races, sharing with torch's rendezvous, reachability."""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.rendezvous import rendezvous

from ray_fracbackend.decide.error_texts import is_address_in_use
from ray_fracbackend.errors import PortInUseError, RendezvousError, UnreachableMasterError
from ray_fracbackend.worker import reach, store
from ray_fracbackend.worker.reach import check_reachable
from ray_fracbackend.worker.state import STATE

# A start sets it so for torch's rendezvous: no torch for Windows has a libuv store.
LIBUV = str(int(sys.platform != "win32"))


class WindowsError(PermissionError):
    """Error 10013 as Python raises it on Windows: with the errno of Permission denied."""

    winerror = 10013


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    store.release_store()


def listener(port: int = 0) -> socket.socket:
    return socket.create_server(("0.0.0.0", port))


def client_of(port: int) -> TCPStore:
    """Return a client of a store on this machine; torch's default is libuv, which no Windows wheel has."""
    timeout = timedelta(seconds=60)
    return TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False, use_libuv=store.uses_libuv())


def free_range(length: int) -> int:
    for first in range(23000, 40000, length):
        try:
            for port in range(first, first + length):
                listener(port).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def test_a_held_store_accepts_clients_and_is_shared_with_torchs_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own rendezvous of the same process finds the open store by its port, so no other process can take the port."""
    port = store.hold_store(None)
    client_of(port).set("key", "value")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("USE_LIBUV", LIBUV)
    shared, _, _ = next(iter(rendezvous("env://", 0, 1, timeout=timedelta(seconds=60))))
    assert shared.get("key") == b"value"
    store.release_store()  # the group still uses it
    assert shared.get("key") == b"value"


@pytest.mark.parametrize("by_chance", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_store_on_a_port_of_an_ended_one_is_shared_too(by_chance: bool) -> None:
    """A worker that starts many groups may reuse a port; torch's rendezvous still finds the store that is open there."""
    ports = {store.hold_store(None)}
    while (port := store.hold_store(None if by_chance else min(ports))) not in ports:
        ports.add(port)
    url = f"tcp://127.0.0.1:{port}?use_libuv={LIBUV}"
    shared, _, _ = next(iter(rendezvous(url, 0, 1, timeout=timedelta(seconds=60))))
    shared.set("key", "value")
    assert STATE.store is not None
    assert STATE.store.get("key") == b"value"


@pytest.mark.linux(reason="needs a torch that takes an open socket")
def test_the_store_of_one_node_listens_only_on_loopback() -> None:
    """Other machines cannot reach it; torch's rendezvous of this and other processes on the node can."""
    port = store.hold_store(None, one_node=True)
    listening = [entry.laddr for entry in psutil.Process().net_connections("tcp") if entry.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    shared, _, _ = next(iter(rendezvous(f"tcp://127.0.0.1:{port}", 0, 1, timeout=timedelta(seconds=60))))
    shared.set("key", "value")
    assert client_of(port).get("key") == b"value"
    del shared
    with listener() as other, pytest.raises(PortInUseError):
        store.hold_store(other.getsockname()[1], one_node=True)


def test_a_new_store_knows_nothing_of_the_last() -> None:
    """A restarted start on a fixed port has an empty store, without the keys of the failed one."""
    port = store.hold_store(None)
    for _ in range(2):
        store.hold_store(port)
        client = client_of(port)
        assert not client.check(["key"])
        client.set("key", "value")
        del client


def test_the_store_listens_on_both_families() -> None:
    port = store.hold_store(None)
    check_reachable("127.0.0.1", port)
    if socket.has_ipv6:
        check_reachable("::1", port)


@pytest.mark.parametrize("platform", [sys.platform, "win32"])
def test_a_range_skips_taken_ports(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows c10d binds the port itself, and its error counts like the system's."""
    first = free_range(3)
    monkeypatch.setattr(store.sys, "platform", platform)
    with listener(first):
        assert store.hold_store((first, first + 2)) == first + 1


@pytest.mark.parametrize("code", [10013, 10048])
def test_a_taken_port_in_another_language(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """c10d's message has Windows' text in its ANSI code page; torch raises a UnicodeDecodeError in place of its RuntimeError."""
    tried = []

    def refuse(host: str, port: int, *args: object, **options: object) -> TCPStore:
        tried.append(port)
        text = f"failed to listen on any local network address. port: {port} (system error: {code} - unzul\xe4ssig)"
        text.encode("latin-1").decode()
        raise AssertionError("this is UTF-8")

    monkeypatch.setattr(store.sys, "platform", "win32")
    monkeypatch.setattr(store, "TCPStore", refuse)
    with pytest.raises(PortInUseError, match=rf"{code} - unzul.ssig.*netsh interface ipv4 show excludedportrange"):
        store.hold_store((23000, 23002))
    assert tried == [23000, 23001, 23002]


def test_a_start_on_windows_listens_only_with_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each program that listens on the network, the firewall asks the user."""
    monkeypatch.setattr(store.sys, "platform", "win32")
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("listens"))
    check_reachable("127.0.0.1", store.hold_store(None))


def test_a_taken_port_is_named() -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"master_port={port} is taken") as info:
            store.hold_store(port)
    assert info.value.ranks == (0,)


def test_a_port_that_processes_of_an_earlier_attempt_still_hold() -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        threading.Timer(2.0, taken.close).start()
        assert store.hold_store(port, wait_s=30) == port


def test_a_node_whose_ipv6_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel refuses an address family, the other one is used."""
    create = socket.create_server

    def refuse(address: tuple[str, int], **options: object) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, **options)

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    monkeypatch.setattr(socket, "create_server", refuse)
    check_reachable("127.0.0.1", store.hold_store(None))


def test_a_port_that_is_freed_in_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed port is tried three times, because an earlier start in the same process may still be closing."""
    taken = listener()
    port = taken.getsockname()[1]
    monkeypatch.setattr(store.time, "sleep", lambda _: taken.close())
    assert store.hold_store(port) == port


def test_what_a_slow_worker_waits_for_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A taken port, and a connection that takes as long as a name server that does not answer."""
    logged: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(store.logger, level, lambda text, *values: logged.append(text % values))
    with listener() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError):
            store.hold_store(port, wait_s=0.6)
    assert logged == [f"port {port} is taken on rank 0's node: waiting for it, up to 1 s"]
    monkeypatch.setattr(store, "_SLOW_S", -1.0)
    store.hold_store(None)
    assert logged[1].startswith("connecting to rank 0's store took 0 s, usually because a name server does not answer")


def test_a_rank_of_the_attempt_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows c10d returns the same store with all keys if the process still references a store with this port."""
    monkeypatch.setattr(store.sys, "platform", "win32")
    port = free_range(1)
    store.hold_store(port)
    first = STATE.store
    store.connect_store(1, 2, "127.0.0.1", port, 20, "first")
    assert store.connect_store(0, 2, "127.0.0.1", port, 20, "first").check(["ray_fracbackend/connected/1"])
    assert store.hold_store(port) == port
    assert first is not None
    with pytest.raises(RendezvousError) as caught:
        store.connect_store(0, 2, "127.0.0.1", port, 1, "second")
    assert caught.value.ranks == (1,)
    store.connect_store(1, 2, "127.0.0.1", port, 20, "second")
    store.connect_store(0, 2, "127.0.0.1", port, 20, "second")


@pytest.mark.parametrize(
    ("error", "in_use"),
    [
        (OSError(98, "x"), True),
        (OSError(48, "x"), True),
        (OSError(10048, "x"), True),
        (OSError(10013, "x"), True),
        (WindowsError(13, "An attempt was made to access a socket"), True),
        (PermissionError(13, "a port below 1024 on Linux"), False),
        (OSError(111, "refused"), False),
        (RuntimeError("failed to bind to [::]:1 (errno: 98 - Address already in use)"), True),
        (RuntimeError("listen ... code: -98, name: EADDRINUSE"), True),
        (RuntimeError("(system error: 10048 - Only one usage of each socket address)"), True),
        (RuntimeError("(system error: 10013 - An attempt was made to access a socket)"), True),
        (RuntimeError("connection to 10.0.0.98 timed out after 98 s"), False),
    ],
)
def test_address_in_use_of_every_platform(error: Exception, in_use: bool) -> None:
    """The codes of Linux, macOS and both of Windows are detected by number and by c10d's message."""
    assert is_address_in_use(error) is in_use


def test_other_failures_of_the_store_are_not_called_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(port: int, host: str | None = None) -> TCPStore:
        raise RuntimeError("no memory")

    monkeypatch.setattr(store, "open_store", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        store.hold_store(None)


def test_a_node_without_loopback_opens_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(port: int, host: str | None = None) -> TCPStore:
        assert host is not None
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(store, "open_store", refuse)
    with pytest.raises(OSError, match="Cannot assign"):
        store.hold_store(None, one_node=True)


def test_a_refused_connection_is_named_within_its_bound() -> None:
    with listener() as closed:
        port = closed.getsockname()[1]
    with pytest.raises(UnreachableMasterError, match=rf"127\.0\.0\.1:{port} within 0\.5 s \(refused") as info:
        check_reachable("127.0.0.1", port, 0.5)
    assert "master_addr" in str(info.value)


def test_a_slow_refusal_is_told_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, which tries a closed port for two seconds: the limit cuts the last attempt, and those before tell the cause."""

    def refuse(address: tuple[str, int], timeout: float) -> None:
        time.sleep(min(timeout, 0.2))
        raise ConnectionRefusedError(10061, "refused") if timeout > 0.2 else TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(reach, "_PAUSE_S", 0.1)
    with pytest.raises(UnreachableMasterError, match=r"within 0\.7 s \(refused: "):
        check_reachable("127.0.0.1", 1, 0.7)


def test_windows_never_uses_libuv(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is created directly ignores USE_LIBUV, so use_libuv is passed: never on Windows, elsewhere from the variable."""
    for platform, value, is_used in (("linux", "1", True), ("win32", "1", False), ("linux", "0", False)):
        monkeypatch.setenv("USE_LIBUV", value)
        monkeypatch.setattr(store.sys, "platform", platform)
        assert store.uses_libuv() is is_used


def test_a_store_without_libuv_works_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration for Windows, on this system: the same rendezvous without libuv in URL and store."""
    monkeypatch.setenv("USE_LIBUV", "0")
    port = store.hold_store(None)
    shared, _, _ = next(iter(rendezvous(f"tcp://127.0.0.1:{port}?use_libuv=0", 0, 1, timeout=timedelta(seconds=60))))
    assert not shared.libuvBackend


@pytest.mark.linux(reason="needs a torch with libuv")
def test_a_torch_whose_libuv_accepts_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.8 the store on loopback does not use libuv; torch's rendezvous and clients with libuv can use it."""
    monkeypatch.setenv("USE_LIBUV", "1")
    monkeypatch.setattr(store.torch, "__version__", "2.7.1+cu126")
    port = store.hold_store(None, one_node=True)
    assert STATE.store is not None
    assert not STATE.store.libuvBackend
    shared, _, _ = next(iter(rendezvous(f"tcp://127.0.0.1:{port}", 0, 1, timeout=timedelta(seconds=60))))
    assert shared.libuvBackend
    shared.set("key", "value")
    client = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    assert client.get("key") == b"value"
