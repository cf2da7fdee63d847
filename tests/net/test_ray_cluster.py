"""A real Ray cluster of two nodes whose host names resolve wrongly: stock Ray Train fails on it, FracTorchConfig trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from net_cluster_driver import FIREWALLED_PORT
from net_nodes import HERE, Node, join

GCS_PORT = 6379


class Cluster:
    """Two joined nodes with Ray on each."""

    def __init__(self, head: Node, other: Node, folder: Path) -> None:
        self.head, self.other, self.folder = head, other, folder

    def start(self) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        common = ["--num-cpus=2", '--resources={"slot": 1}', "--object-store-memory=80000000", "--disable-usage-stats"]
        head = [f"--node-ip-address={self.head.ip}", f"--port={GCS_PORT}", "--head", "--include-dashboard=false"]
        other = [f"--node-ip-address={self.other.ip}", f"--address={self.head.ip}:{GCS_PORT}"]
        for node, args in ((self.head, [*head, f"--temp-dir={self.folder}/ray"]), (self.other, other)):
            self._run(node, [ray, "start", *args, *common], 60)

    def fit(self, *names: str, timeout_s: float = 90) -> list[dict[str, Any]]:
        self._run(self.head, [sys.executable, str(HERE / "net_cluster_driver.py"), str(self.folder), *names], timeout_s)
        return [json.loads((self.folder / f"{name}.json").read_text()) for name in names]

    def _run(self, node: Node, command: list[str], timeout_s: float) -> None:
        environment = {**node.environment(), "RAY_TRAIN_V2_ENABLED": "1", "RAY_ADDRESS": f"{self.head.ip}:{GCS_PORT}"}
        if "start" in command:
            del environment["RAY_ADDRESS"]
        with open(self.folder / "log", "ab") as log:
            done = subprocess.run(
                node.command(*command), stdout=log, stderr=log, env=environment, timeout=timeout_s, check=False
            )
        assert done.returncode == 0, (self.folder / "log").read_text()[-5000:]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    name = f"rfb-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    folder = Path(tempfile.mkdtemp(prefix="rfb-"))  # short: Ray puts Unix sockets below it
    nodes: list[Node] = []
    try:
        for letter, number in (("a", 1), ("b", 2)):
            nodes.append(Node(f"{name}-{letter}", f"ray-{letter}", number))
        join(*nodes)
        nodes[0].hosts("127.0.1.1 ray-a")
        nodes[1].hosts("203.0.113.8 ray-b")
        found = Cluster(*nodes, folder)
        found.start()
        yield found
    finally:
        for node in nodes:
            node.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_trains_where_host_names_resolve_wrongly(cluster: Cluster) -> None:
    """Each node's name leads to loopback or to a foreign address: stock's Gloo cannot connect, ours trains in step."""
    stock, ours = cluster.fit("stock", "ours")
    assert stock["error"] is not None
    assert stock["trained"] is None
    assert ours["error"] is None
    assert ours["trained"]["equal_gradients"]
    assert ours["trained"]["nodes"] == [cluster.head.ip, cluster.other.ip]
    assert "Gloo over eth0" in ours["trained"]["rendezvous"]


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs the command nft (package nftables)")
def test_an_unreachable_master_ends_in_one_sentence(cluster: Cluster) -> None:
    """A firewalled port and an address of the wrong interface each end the start in under 15 s, by rank, node and address."""
    rule = f"add rule inet t in iif eth0 tcp dport {FIREWALLED_PORT} drop"
    for node in (cluster.head, cluster.other):
        node.execute("nft", f"add table inet t; add chain inet t in {{ type filter hook input priority 0; }}; {rule}")
        node.ip_command("route", "add", "blackhole", "10.88.0.0/24")
    firewalled, wrong = cluster.fit("firewalled", "wrong_interface")
    for found, where in ((firewalled, f":{FIREWALLED_PORT}"), (wrong, "10.88.0.1:")):
        assert found["trained"] is None
        assert found["on_start_s"] < 15
        assert "cannot reach rank 0's store at" in found["error"]
        assert where in found["error"]
        assert "rank 1 (node 10.77.0." in found["error"]
