"""T1 to T8 and T11: real networks that break stock's start, and our start on the same networks.

With --full stock's start runs too where only its failure shows that the names are as wrong as intended.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import net_calls
import pytest
import torch.distributed as dist
from net_nodes import Node, Worker, address, own_interface
from net_starts import ours, probe, start, stock

from ray_fracbackend.decide.rendezvous import Rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.errors import BackendUnavailableError, PortInUseError, RendezvousError, UnreachableMasterError

SUM_OF_TWO = 3.0
FAILED_CONNECT = "has failed to connect"

Nodes = tuple[Node, Node]


def works(
    nodes: Sequence[Node], folder: Path, node_ips: Sequence[str] | None = None, options: Any = None, **env: str
) -> tuple[Rendezvous, list[Worker]]:
    """Run our start, whose ranks must compute the correct sum."""
    results, plan, workers = ours(nodes, folder, node_ips, options, **env)
    assert results == [SUM_OF_TWO, SUM_OF_TWO]
    return plan, workers


@pytest.mark.full
def test_t1_v6only_sockets_warn_and_still_start(two_nodes: Nodes, tmp_path: Path) -> None:
    """If IPv6 sockets accept no IPv4, as on Windows, c10d logs a failure with a foreign name, and the start works."""
    node = two_nodes[0]
    node.sysctl(bindv6only=1)
    node.hosts("127.0.0.1 huya.com", f"127.0.0.1 {node.hostname}")
    plan, workers = works([node, node], tmp_path)
    assert plan.master_addr == "127.0.0.1"
    assert FAILED_CONNECT in "".join(worker.log.read_text() for worker in workers)


@pytest.mark.full
def test_t2_torch_without_a_gloo_transport_is_named_before_rendezvous(two_nodes: Nodes, tmp_path: Path) -> None:
    """Without a transport, as in the Windows wheels 2.8.0 to 2.10.0, stock's error is unclear, ours states what to do."""
    node = two_nodes[0]
    results, _ = stock([node, node], tmp_path, "127.0.0.1", GLOO_DEVICE_TRANSPORT="UV")
    assert all("unsupported gloo device" in str(result) for result in results)
    facts, _ = probe([node, node], tmp_path, GLOO_DEVICE_TRANSPORT="UV")
    with pytest.raises(BackendUnavailableError, match="unset GLOO_DEVICE_TRANSPORT"):
        start(facts, [])


WRONG_NAMES = {
    "t3-debian": ("127.0.1.1 {}", "127.0.1.1 {}"),
    "loopback-and-link-local": ("127.0.0.1 {}", "169.254.3.4 {}"),  # ray#24305
    "t4-foreign": ("203.0.113.7 {}", "203.0.113.8 {}"),
    "t4-unresolvable": ("203.0.113.7 other", "203.0.113.7 other"),
}


@pytest.mark.parametrize("case", WRONG_NAMES)
def test_t3_t4_wrong_host_names_do_not_matter(two_nodes: Nodes, tmp_path: Path, case: str, full: bool) -> None:
    """If each node's own name leads to loopback, elsewhere or nowhere, stock's ranks advertise loopback and fail."""
    for node, line in zip(two_nodes, WRONG_NAMES[case], strict=True):
        node.hosts(line.format(node.hostname))
    if full:
        results, _ = stock(two_nodes, tmp_path, two_nodes[0].ip, timeout_s=1.5)
        assert SUM_OF_TWO not in results
        assert any(isinstance(result, RuntimeError) for result in results)
    plan, workers = works(two_nodes, tmp_path)
    assert plan.master_addr == two_nodes[0].ip
    assert [worker.call(os.getenv, "GLOO_SOCKET_IFNAME") for worker in workers] == ["eth0", "eth0"]


def test_t5_names_of_different_families_do_not_matter(two_nodes: Nodes, tmp_path: Path, full: bool) -> None:
    """One node's name has an IPv6 address and the other's an IPv4 address: stock's Gloo compares families and fails."""
    first, second = two_nodes
    first.hosts(f"{first.ip6} {first.hostname}")
    second.hosts(f"{second.ip} {second.hostname}")
    if full:
        results, _ = stock(two_nodes, tmp_path, first.ip, timeout_s=1.5)
        assert SUM_OF_TWO not in results
        assert any("ss_family" in str(result) for result in results)
    works(two_nodes, tmp_path)


def test_t6_ipv6_literals_go_without_brackets(two_nodes: Nodes, tmp_path: Path) -> None:
    """On IPv6-only nodes the plain literal works."""
    for node in two_nodes:
        node.ip_command("addr", "del", f"{node.ip}/24", "dev", "eth0")
        node.hosts(f"{node.ip6} {node.hostname}")
    for init_method in ("env", "tcp"):
        options = Settings(init_method=init_method)
        plan, _ = works(two_nodes, tmp_path, [node.ip6 for node in two_nodes], options)
        assert plan.master_addr == two_nodes[0].ip6


def test_t7_an_explicit_loopback_address_is_tried(two_nodes: Nodes, tmp_path: Path) -> None:
    """A configured loopback address is used, and the rank that cannot use it reports this before c10d tries."""
    options = Settings(master_addr="127.0.0.1")
    facts, workers = probe(two_nodes, tmp_path, options=options)
    results, _ = start(facts, workers, options, wait_for=(1,))
    assert isinstance(results[0], UnreachableMasterError)


def test_t8_ipv6_switched_off(two_nodes: Nodes, tmp_path: Path) -> None:
    """With IPv6 disabled in the kernel the start works over IPv4."""
    for node in two_nodes:
        node.sysctl(conf__all__disable_ipv6=1)
    works(two_nodes, tmp_path)


@pytest.mark.parametrize(
    ("master_port", "named"),
    [
        (21200, r"master_port=21200 is taken on rank 0's node .*give a wider range \(low, high\)"),
        ((21100, 21101), r"master_port=\(21100, 21101\) is taken"),
    ],
)
def test_t11_taken_ports_are_named_at_once(
    two_nodes: Nodes, tmp_path: Path, master_port: int | tuple[int, int], named: str
) -> None:
    """A fixed port, or a range, that is in use has no replacement: the error names it and suggests a range."""
    node = two_nodes[0]
    for port in (master_port,) if isinstance(master_port, int) else master_port:
        node.spawn(tmp_path).call(net_calls.occupy, port)
    with pytest.raises(PortInUseError, match=named):
        probe([node], tmp_path, options=Settings(master_port=master_port))


NUM_STARTS = 200
AT_A_TIME = 8
# Twice the number of ports that the concurrent starts hold.
RANGE = (22000, 22000 + 2 * AT_A_TIME - 1)


def start_many(node: Node, folder: Path, options: Settings) -> list[Any]:
    def one(_: int) -> Any:
        results, _, workers = ours([node, node], folder, options=options)
        for worker in workers:
            worker.call(dist.destroy_process_group)
            worker.kill()
        return results

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(one, range(NUM_STARTS)))


@pytest.mark.full
@pytest.mark.parametrize("options", [Settings(), Settings(master_port=RANGE)], ids=["any-port", "range"])
def test_t11_starts_side_by_side_never_clash(two_nodes: Nodes, tmp_path: Path, options: Settings) -> None:
    """Eight concurrent starts, with any port or a shared narrow range, all compute the correct sum."""
    assert start_many(two_nodes[0], tmp_path, options) == [[3.0, 3.0]] * NUM_STARTS


def test_a_configured_name_is_resolved_once_on_every_rank(two_nodes: Nodes, tmp_path: Path) -> None:
    """A configured host name becomes the literal that each rank resolves, even if rank 0's own is loopback."""
    first, second = two_nodes
    first.hosts(f"127.0.1.1 {first.hostname} train-master")
    second.hosts(f"{first.ip} train-master")
    plan, _ = works(two_nodes, tmp_path, options=Settings(master_addr="train-master"))
    assert plan.master_addrs == ("127.0.1.1", first.ip)


@pytest.mark.full
def test_a_silent_name_server_does_not_stop_the_start(two_nodes: Nodes, tmp_path: Path) -> None:
    """c10d looks up peers' names, 10 s each time: the start waits, and leaves the resolver of the workers unchanged."""
    for node in two_nodes:
        node.name_server("127.0.0.77")
        node.spawn(tmp_path).call(net_calls.stay_silent, "127.0.0.77")
    _, workers = works(two_nodes, tmp_path, RES_OPTIONS="ndots:1")
    assert [worker.call(os.getenv, "RES_OPTIONS") for worker in workers] == ["ndots:1", "ndots:1"]


@pytest.mark.parametrize("name", ["netz-\u00fc0", "eth0.100", "a" * 15])
def test_hostile_but_usable_interface_names(two_nodes: Nodes, tmp_path: Path, name: str) -> None:
    """Non-ASCII, dotted and very long names reach Gloo unchanged on Linux, with host names that lead nowhere."""
    for node in two_nodes:
        node.hosts(f"127.0.1.1 {node.hostname}")
        rename(node, "eth0", name)
    try:
        _, workers = works(two_nodes, tmp_path)
        assert workers[1].call(os.getenv, "GLOO_SOCKET_IFNAME") == name
    finally:
        for node in two_nodes:
            rename(node, name, "eth0")


def test_an_address_on_no_interface_uses_the_route(two_nodes: Nodes, tmp_path: Path) -> None:
    """If Ray knows a node by a translated address, it uses the interface of its route to rank 0, with a warning."""
    for node in two_nodes:
        node.hosts(f"127.0.1.1 {node.hostname}")
    plan, workers = works(two_nodes, tmp_path, [two_nodes[0].ip, "198.51.100.9"])
    assert workers[1].call(os.getenv, "GLOO_SOCKET_IFNAME") == "eth0"
    assert any("no interface has the node's address 198.51.100.9" in warning for warning in plan.warnings)


@pytest.mark.full
def test_a_bridge_on_every_node_is_ignored(two_nodes: Nodes, tmp_path: Path) -> None:
    """Equal addresses on interfaces other than the nodes' (libvirt's virbr0: nccl#913, ray#40850) are not used."""
    with ExitStack() as stack:
        for node in two_nodes:
            stack.enter_context(own_interface(node, "virbr0", "192.168.122.1/24"))
        _, workers = works(two_nodes, tmp_path)
        assert [worker.call(os.getenv, "GLOO_SOCKET_IFNAME") for worker in workers] == ["eth0", "eth0"]


@pytest.mark.full
def test_variables_of_the_user_for_the_rendezvous_do_no_harm(two_nodes: Nodes, tmp_path: Path) -> None:
    """With brackets around an IPv6 address c10d finds nothing (verl#2550); a start uses its own address."""
    plan, _ = works(two_nodes, tmp_path, MASTER_ADDR=f"[{two_nodes[0].ip6}]", MASTER_PORT="29500")
    assert plan.master_addr == two_nodes[0].ip


@pytest.mark.full
def test_a_node_without_free_ports(two_nodes: Nodes, tmp_path: Path) -> None:
    """Gloo's own error reports an address in use (ray#35907); ours names the exhausted range."""
    node = two_nodes[0]
    node.execute("sysctl", "-qw", "net.ipv4.ip_local_port_range=40000 40007")
    try:
        results, _, _ = ours([node] * 8, tmp_path)
    finally:
        node.execute("sysctl", "-qw", "net.ipv4.ip_local_port_range=32768 60999")
    # A rank that comes later finds that rank 0 has failed and its store has ended.
    told = [result for result in results if "bind: Address already in use" in str(result)]
    assert told
    for error in told:
        assert isinstance(error, RendezvousError)  # of the check of Gloo's device, or of the group
        assert "This node has no free port left (net.ipv4.ip_local_port_range on Linux)" in str(error)


def test_a_users_interface_is_kept_and_a_stale_one_is_named(two_nodes: Nodes, tmp_path: Path) -> None:
    """The user's GLOO_SOCKET_IFNAME is never replaced; if it does not exist, the error lists the existing names."""
    facts, workers = probe(two_nodes, tmp_path, GLOO_SOCKET_IFNAME="eth9")
    results, plan = start(facts, workers)
    assert "GLOO_SOCKET_IFNAME=eth9 is kept; without it eth0 would be used" in plan.warnings[0]
    for result in results:
        assert isinstance(result, RendezvousError)
        assert re.search(r"\(GLOO_SOCKET_IFNAME=eth9\).*This node has lo, eth0\.", str(result))


def rename(node: Node, old: str, new: str) -> None:
    node.ip_command("link", "set", old, "down")
    node.ip_command("link", "set", old, "name", new)
    address(node, new)
