"""If a rank cannot reach the master, it ends with one sentence within seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from net_nodes import Node, own_interface
from net_starts import probe, start

from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.errors import UnreachableMasterError

Nodes = tuple[Node, Node]
FIREWALLED_PORT = 21500


def firewall(node: Node, rule: str) -> None:
    chain = "add table inet t; add chain inet t in { type filter hook input priority 0; }"
    node.execute("nft", f"{chain}; add rule inet t in {rule}")


def our_error(nodes: Nodes, folder: Path, node_ips: list[str], options: Settings | None = None) -> str:
    facts, workers = probe(nodes, folder, node_ips, options)
    (error,), _ = start(facts, workers, options, wait_for=(1,))
    assert isinstance(error, UnreachableMasterError)
    return str(error)


@pytest.mark.full
def test_the_address_of_a_wrong_interface_is_named(two_nodes: Nodes, tmp_path: Path) -> None:
    """Ray used the address of an interface to which the other node has no route."""
    with own_interface(two_nodes[0], "vpn0", "10.88.0.1/24"):
        text = our_error(two_nodes, tmp_path, ["10.88.0.1", two_nodes[1].ip])
    assert "cannot reach rank 0's store at 10.88.0.1:" in text
    assert "Network is unreachable" in text


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs the command nft (package nftables)")
@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ("drop", "drops the packets"),
        pytest.param("reject with tcp reset", "refused: a firewall", marks=pytest.mark.full),
    ],
)
def test_a_firewalled_port_is_named(two_nodes: Nodes, tmp_path: Path, verdict: str, told: str) -> None:
    """A firewall on rank 0's node drops or rejects connections to the store's port."""
    options = Settings(master_port=FIREWALLED_PORT)
    firewall(two_nodes[0], f"iif != lo tcp dport {FIREWALLED_PORT} {verdict}")
    text = our_error(two_nodes, tmp_path, [node.ip for node in two_nodes], options)
    assert f"at {two_nodes[0].ip}:{FIREWALLED_PORT} within 5 s" in text
    assert told in text


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs the command nft (package nftables)")
def test_a_port_range_fits_through_a_firewall(two_nodes: Nodes, tmp_path: Path) -> None:
    """If the firewall allows a range for the store, the store uses a port of it and the start works."""
    firewall(two_nodes[0], "iif eth0 tcp dport 1-20999 drop")
    options = Settings(master_port=(21600, 21605))
    facts, workers = probe(two_nodes, tmp_path, options=options)
    results, plan = start(facts, workers, options)
    assert 21600 <= plan.master_port <= 21605
    assert results == [3.0, 3.0]
