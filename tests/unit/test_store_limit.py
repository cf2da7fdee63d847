"""The limit on torch's store client, with real stores: one in a process that is stopped, one that answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from ray_fracbackend.errors import GroupFormationError, RendezvousError
from ray_fracbackend.store_limit import close_connections, limited

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(sys.platform == "win32", reason="Windows does not list a process's sockets as descriptors"),
]

_SERVER = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
store.set("there", "1")
print(store.port, flush=True)
input()
"""


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Pid and port of a store in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1), wait_for_workers=False)


def in_limit(port: int, after_s: float, body: Callable[[], None]) -> None:
    """A body as a start has it: what c10d raises is the cause of an error of this package."""
    with limited("127.0.0.1", port, after_s):
        try:
            body()
        except dist.DistNetworkError as error:
            raise GroupFormationError("creating the group failed", ranks=(1,)) from error


def test_a_wait_on_a_stopped_store_ends(server: tuple[int, int]) -> None:
    """torch's own wait of one second would go on for ever; the error is of the step's class and names the store."""
    pid, port = server
    store = client(port)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(GroupFormationError, match=f"waiting at rank 0's store at 127.0.0.1:{port} after 3 s") as caught:
        in_limit(port, 3.0, lambda: store.wait(["never"], timedelta(seconds=1)))
    assert caught.value.ranks == (1,)
    assert time.monotonic() - started < 60


def test_in_time_nothing_is_closed(server: tuple[int, int]) -> None:
    """The connection goes on, and the thread is gone."""
    _, port = server
    store = client(port)
    before = threading.active_count()
    with limited("127.0.0.1", port, 0.5):
        assert store.get("there") == b"1"
    assert threading.active_count() == before
    time.sleep(0.6)
    assert store.get("there") == b"1"


def test_a_time_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds beyond what a thread can wait for are as good as none."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with limited("127.0.0.1", 1, 1e12):
        time.sleep(0.1)
    assert raised == []


def test_an_end_after_the_time_is_an_error(server: tuple[int, int]) -> None:
    """A body that ends well too late must not go on with a store that is closed."""
    _, port = server
    store = client(port)
    with pytest.raises(RendezvousError, match=r"took longer than 0.2 s.*Raise start_timeout_s"):
        in_limit(port, 0.2, lambda: time.sleep(1))
    with pytest.raises(dist.DistNetworkError):
        store.get("there")


def test_an_error_of_another_cause_stays(server: tuple[int, int]) -> None:
    """What failed by itself keeps its own words."""
    _, port = server
    store = client(port)

    def fail() -> None:
        time.sleep(1)
        raise RendezvousError("the reason")

    with pytest.raises(RendezvousError, match="the reason"):
        in_limit(port, 0.2, fail)
    del store


def test_other_connections_stay(server: tuple[int, int]) -> None:
    """Closed is what goes to that address and port alone, and no descriptor is left."""
    _, port = server
    with socket.create_server(("127.0.0.1", 0)) as listener, open(os.devnull) as _, socket.socketpair()[0]:
        other = socket.create_connection(listener.getsockname()[:2])
        store = client(port)
        before = len(os.listdir("/dev/fd"))
        assert close_connections("127.0.0.2", port) == 0
        assert close_connections("::ffff:127.0.0.1", port) == 1
        assert len(os.listdir("/dev/fd")) == before
        other.sendall(b"still there")
        other.close()
        del store
