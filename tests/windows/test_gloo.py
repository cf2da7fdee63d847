"""Gloo's transport and its network devices, the adapters' names, and c10d's harmless line."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from ray_fracbackend.decide.addresses import is_link_local
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.errors import RendezvousError
from ray_fracbackend.worker.network import check_gloo_device, gloo_missing, interfaces, network_info, resolve
from ray_fracbackend.worker.store import open_store
from tests.processes import free_port, loopback_name, under_wine

pytestmark = pytest.mark.windows(reason="Gloo's uv transport and Windows' adapter names")

has_gloo = gloo_missing() is None
needs_gloo = pytest.mark.skipif(not has_gloo, reason="torch without a Gloo transport")
NO_TRANSPORT = "makeDeviceFor{}(): unsupported gloo device"
# A group of one rank creates Gloo's device and connects to its own store.
START_ALONE = """
import sys, torch, torch.distributed as dist
url = f"tcp://127.0.0.1:{sys.argv[1]}?use_libuv=0"
store, _, _ = next(iter(dist.rendezvous(url, 0, 1)))
store.set("key", "value")
print(store.get("key").decode())
if sys.argv[2:]:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    print("all_reduce")
"""


@pytest.fixture(autouse=True)
def _destroyed() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def start_alone() -> None:
    dist.init_process_group("gloo", store=open_store(), rank=0, world_size=1, timeout=timedelta(seconds=60))


def test_transport_by_version() -> None:
    """The wheels of 2.8.0 to 2.10.0 have no Gloo transport; earlier and later ones have one."""
    lacks = "2.8" <= TorchVersion(torch.__version__) < "2.11"
    assert has_gloo == (not lacks)
    assert dist.is_gloo_available()  # this does not check for a transport
    assert not dist.is_nccl_available()


@pytest.mark.skipif(has_gloo, reason="this torch has a Gloo transport")
def test_messages_without_a_transport() -> None:
    """Devices and groups of any size fail with the message that gloo_missing detects, and its text names the versions to install."""
    for make, kind in (
        (dist.ProcessGroupGloo.create_default_device, "Hostname"),
        (lambda: dist.ProcessGroupGloo.create_device(hostname="127.0.0.1"), "Hostname"),
        (lambda: dist.ProcessGroupGloo.create_device(interface=loopback_name()), "Interface"),
        (start_alone, "Hostname"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(NO_TRANSPORT.format(kind))):
            make()
    assert "install torch 2.7.1 or older, or 2.11.0 or newer" in (gloo_missing() or "")
    with pytest.raises(RendezvousError, match=r"install torch 2\.7\.1 or older, or 2\.11\.0 or newer"):
        check_gloo_device(None)


@needs_gloo
def test_default_device() -> None:
    """Gloo can use the loopback adapter by its name, and the host name leads to a device."""
    check_gloo_device(None)
    assert network_info("").loopback_works


@needs_gloo
def test_every_adapter_of_the_rules_makes_a_device() -> None:
    """Gloo finds each adapter that is up by psutil's name, also with blanks."""
    names = [
        name
        for name, addresses in interfaces().items()
        if name.isascii() and "," not in name and not is_link_local(addresses[0])
    ]
    assert loopback_name() in names
    for name in names:
        check_gloo_device(name)


def test_the_socket_module_has_other_names() -> None:
    """socket.if_nameindex() returns none of psutil's names."""
    assert not {name for _, name in socket.if_nameindex()} & set(psutil.net_if_addrs())


@needs_gloo
def test_an_unknown_name_is_refused() -> None:
    """Such as those of the socket module: our error contains Gloo's message, the setting and the node's adapters."""
    name = socket.if_nameindex()[0][1]
    expected = rf"{IFNAME}={name}\): .*Unable to find address for: {name}\. This node has .*{loopback_name()}"
    with pytest.raises(RendezvousError, match=expected):
        check_gloo_device(name)


@needs_gloo
def test_gloo_reads_a_variable_that_python_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's getenv reads a GLOO_SOCKET_IFNAME set in os.environ: a group starts over loopback, and not over eth9."""
    monkeypatch.setenv(IFNAME, "eth9")
    with pytest.raises(RuntimeError, match="Unable to find address for: eth9"):
        start_alone()
    monkeypatch.setenv(IFNAME, loopback_name())
    start_alone()
    dist.all_reduce(torch.ones(3))


def test_other_letters_reach_c_in_the_ansi_code_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo compares UTF-8, so a variable cannot pass it a name with non-ASCII letters."""
    if ctypes.WinDLL("kernel32").GetACP() == 65001:
        pytest.skip("this machine's ANSI code page is UTF-8")
    monkeypatch.setenv("RAY_FRACBACKEND_TEST", "Büro")
    getenv = ctypes.CDLL("ucrtbase").getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"RAY_FRACBACKEND_TEST") == "Büro".encode("mbcs") != "Büro".encode()


@needs_gloo
def test_an_adapter_with_other_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo creates its device from an argument, but finds none by the variable; the error may not be valid UTF-8 either."""
    named = [name for name in interfaces() if name.encode("mbcs", "replace") != name.encode()]
    if not named:
        pytest.skip("this machine has no such adapter")
    dist.ProcessGroupGloo.create_device(interface=named[0])
    monkeypatch.setenv(IFNAME, named[0])
    with pytest.raises((RuntimeError, UnicodeDecodeError), match=r"Unable to find address for|can't decode byte"):
        start_alone()


def test_the_own_host_name_resolves() -> None:
    """On Windows Gloo's lookup of an unresolvable name is undefined behaviour, so ours runs first."""
    assert resolve(socket.gethostname())


def test_an_unknown_host_name_is_error_11001() -> None:
    """Winsock's codes are positive; our error is an OSError with the reason that the plan shows."""
    with pytest.raises(socket.gaierror) as caught:
        resolve("no-such-name.invalid")
    if caught.value.errno == 11002:
        pytest.skip("no name server answers here")
    assert caught.value.errno == 11001
    missing = network_info("", "no-such-name.invalid").master_addr_missing
    assert missing is not None
    assert "11001" in missing


@pytest.mark.parametrize("level", [None, "ERROR"])
def test_the_harmless_line(level: str | None) -> None:
    """c10d tries the IPv4 address on an IPv6 socket, warns, and connects anyway; TORCH_CPP_LOG_LEVEL=ERROR hides it."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", START_ALONE, str(free_port()), *(["group"] if has_gloo else [])],
        env=environment if level is None else {**environment, "TORCH_CPP_LOG_LEVEL": level},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["value", *(["all_reduce"] if has_gloo else [])], done.stderr
    lines = [line for line in done.stderr.splitlines() if "The client socket has failed to connect to [" in line]
    if level is not None or not socket.has_dualstack_ipv6():
        assert lines == []
        return
    # Address not available; Wine reports network unreachable.
    code = 10051 if under_wine() else 10049
    assert lines
    assert all(f"(system error: {code} - " in line for line in lines), lines
