"""Network of a worker's node, with this machine's loopback and simulated answers of torch."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections import namedtuple
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch.distributed as dist

from ray_fracbackend.errors import RendezvousError
from ray_fracbackend.worker import network
from tests.processes import loopback_name

Address = namedtuple("Address", "family address")
Stats = namedtuple("Stats", "isup")


def fake_nics(monkeypatch: pytest.MonkeyPatch, nics: dict[str, tuple[bool | None, list[tuple[int, str]]]]) -> None:
    stats = {name: Stats(up) for name, (up, _) in nics.items() if up is not None}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    addresses = {name: [Address(*entry) for entry in entries] for name, (_, entries) in nics.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)


@pytest.mark.parametrize(
    ("resolved", "address"),
    [
        (("127.0.1.1", "172.16.0.9", "10.0.0.1", "fd88::1"), "10.0.0.1"),
        (("172.16.0.9", "fd88::9"), "172.16.0.9"),
        (("127.0.1.1",), "head.pods.local"),
        (None, "head.pods.local"),
    ],
    ids=["own", "translated", "loopback", "unknown"],
)
def test_a_node_that_ray_knows_by_name(
    monkeypatch: pytest.MonkeyPatch, resolved: tuple[str, ...] | None, address: str
) -> None:
    """The address of the name that other nodes reach; a name without one stays. Literal addresses are not looked up."""

    lookup = MagicMock(side_effect=OSError) if resolved is None else MagicMock(return_value=resolved)
    monkeypatch.setattr(network, "resolve", lookup)
    fake_nics(monkeypatch, {"eth0": (True, [(socket.AF_INET, "10.0.0.1"), (socket.AF_INET6, "fd88::1")])})
    assert network.node_address("head.pods.local") == address
    assert network.node_address("10.9.9.9") == "10.9.9.9"


def test_interfaces_that_are_down_or_link_local_only_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of containers, with only fe80 addresses; scopes are removed. An alias is listed without a state of its own."""
    of_eth0 = [(socket.AF_INET, "10.0.0.1"), (socket.AF_INET6, "fe80::1%eth0"), (-1, "00:00:00:00:00:00")]
    nics = {
        "eth0": (True, of_eth0),
        "eth0:1": (None, [(socket.AF_INET, "10.0.0.9")]),
        "cali1": (True, [(socket.AF_INET6, "fe80::2%cali1")]),
        "wlan0": (False, [(socket.AF_INET, "10.0.0.2")]),
    }
    fake_nics(monkeypatch, nics)
    assert network.interfaces() == {"eth0": ("10.0.0.1", "fe80::1"), "eth0:1": ("10.0.0.9",)}


@pytest.mark.parametrize("error", [PermissionError("no netlink here"), psutil.AccessDenied()])
@pytest.mark.parametrize("name", ["net_if_stats", "net_if_addrs"])
def test_interfaces_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """As in a sandbox: no interface is known, and the probe continues."""
    monkeypatch.setattr(psutil, name, MagicMock(side_effect=error))
    assert network.interfaces() == {}
    assert network.network_info("boot").interfaces == {}


def test_this_machines_loopback_is_found() -> None:
    """The real list has an interface with 127.0.0.1, and Gloo accepts its name."""
    name = next(name for name, addresses in network.interfaces().items() if "127.0.0.1" in addresses)
    network.check_gloo_device(name)
    assert network.route_interface("127.0.0.1") == name


def test_a_missing_interface_is_named_with_the_existing_ones() -> None:
    says = rf"GLOO_SOCKET_IFNAME=nope\d.*This node has .*{re.escape(loopback_name())}"
    with pytest.raises(RendezvousError, match=says):
        network.check_gloo_device("nope9")


def test_a_missing_transport_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's 'unsupported gloo device' becomes advice to install other versions or to unset the variable."""
    monkeypatch.setattr(sys, "platform", "win32")
    assert network.gloo_missing() is None

    def unsupported(**device: str) -> None:
        raise RuntimeError("makeDeviceForHostname(): unsupported gloo device")

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", unsupported)
    assert "2.7.1 or older, or 2.11.0 or newer" in str(network.gloo_missing())
    with pytest.raises(RendezvousError, match=r"2\.7\.1 or older"):
        network.check_gloo_device("lo")
    monkeypatch.setattr(sys, "platform", "linux")
    assert network.gloo_missing() is None
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "UV")
    assert "unset GLOO_DEVICE_TRANSPORT" in str(network.gloo_missing())
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert network.gloo_missing() == "torch was built without Gloo; install a build with Gloo"


def test_a_node_without_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another interface would not help: the advice is about the ports."""

    def no_port(**device: str) -> None:
        raise RuntimeError("[socket.cc:95] rv != -1. -1 vs -1. bind: Address already in use")

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", no_port)
    with pytest.raises(RendezvousError, match="no free port left") as caught:
        network.check_gloo_device("lo")
    assert "This node has lo" not in str(caught.value)


def test_names_are_resolved_ipv4_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver's order is kept within a family, and each address appears once."""
    answers = ["fd00::1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(0, 0, 0, "", (answer, 0)) for answer in answers])
    assert network.resolve("head") == ("10.0.0.2", "10.0.0.1", "fd00::1")


def test_a_resolver_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: time.sleep(30))
    with pytest.raises(OSError, match=r"no answer within 0\.2 s"):
        network.resolve("head", 0.2)


def test_facts_carry_why_a_name_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed lookup is reported to the driver, which merges the failures of all ranks into one error."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert "Name or service not known" in str(network.network_info("", "head").master_addr_missing)
    assert network.network_info("", "10.0.0.1").master_addr_missing is None


def test_windows_asks_for_the_host_name_before_gloo_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows Gloo's lookup of an unresolvable name reads an uninitialized pointer, so Gloo must not be called."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(network, "resolve", lambda name: (_ for _ in ()).throw(OSError("11001 host not found")))
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_default_device", lambda: pytest.fail("asked Gloo"))
    with pytest.raises(RendezvousError, match="11001"):
        network.check_gloo_device(None)


@pytest.mark.parametrize(
    ("name", "works"), [("Loopback Pseudo-Interface 1", True), ("Rückschleife", False), ("lo9", False)]
)
def test_windows_tries_the_loopback_adapter(name: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan needs the name for a variable, which brings no other letters to Gloo, and Gloo must find it."""

    def create(interface: str = "", hostname: str = "") -> None:
        if interface == "lo9":
            b"Unable to find address for: lo9 (ung\xfcltig)".decode()

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(network, "interfaces", lambda: {name: ("::1", "127.0.0.1")})
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create)
    assert network.network_info("").loopback_works == works


def test_networks_are_distinguished_by_kernel_and_namespace() -> None:
    """Without a boot id it is empty; with one it is the same for every process of this network."""
    assert network.network_id("") == ""
    assert network.network_id("boot") == network.network_id("boot")


def test_literals_and_names() -> None:
    literals = ["10.0.0.1", "fd00::1", "fe80::1%eth0"]
    assert [value for value in (*literals, "head", "189") if network.parsed(value) is not None] == literals
