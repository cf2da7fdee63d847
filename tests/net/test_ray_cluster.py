"""A start on a real Ray cluster of two nodes with wrong host names, and on an offline machine."""

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
from net_nodes import Node, network

GCS_PORT = 6379


class Cluster:
    """Two connected nodes with Ray on each."""

    def __init__(self, head: Node, other: Node, folder: Path) -> None:
        self.head, self.other, self.folder = head, other, folder

    def start(self) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        common = ["--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats"]
        head = [f"--node-ip-address={self.head.ip}", f"--port={GCS_PORT}", "--head", "--include-dashboard=false"]
        other = [f"--node-ip-address={self.other.ip}", f"--address={self.head.ip}:{GCS_PORT}"]
        # The temporary folder of the drivers is the head node's own.
        (self.folder / "tmp").mkdir()
        own_folder = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {self.folder}/tmp && exec "$@"', "sh"]
        for node, prefix, args in (
            (self.head, [], [*head, f"--temp-dir={self.folder}/ray"]),
            (self.other, own_folder, other),
        ):
            self._run(node, [*prefix, ray, "start", *args, *common], 60)

    def command(self, engine: str, *arguments: str) -> dict[str, Any]:
        """Return the JSON document of one of our commands on the head node."""
        to_file = ["sh", "-c", '"$@" >"$0"', str(self.folder / "json")]
        line = [*to_file, sys.executable, "-m", "ray_fracbackend", *arguments, "--json"]
        self._run(self.head, line, 300, TMPDIR=str(self.folder / "tmp"), RAY_TRAIN_V2_ENABLED=engine)
        return json.loads((self.folder / "json").read_text())

    def _run(self, node: Node, command: list[str], timeout_s: float, **settings: str) -> None:
        environment = {**node.environment(), "RAY_TRAIN_V2_ENABLED": "1", **settings}
        if "start" not in command:
            environment["RAY_ADDRESS"] = f"{self.head.ip}:{GCS_PORT}"
        with open(self.folder / "log", "ab") as log:
            done = subprocess.run(
                node.command(*command), stdout=log, stderr=log, env=environment, timeout=timeout_s, check=False
            )
        assert done.returncode == 0, (self.folder / "log").read_text()[-5000:]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="rfb-"))  # short, because Ray puts Unix sockets below it
    try:
        with network(2, "ray", agents=False) as (nodes, _):
            nodes[0].hosts("127.0.1.1 ray-0")
            nodes[1].hosts("203.0.113.8 ray-1")
            found = Cluster(*nodes, folder)
            found.start()
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["1", "0"], ids=["V2", "V1"])
def test_trains_where_host_names_resolve_wrongly(cluster: Cluster, engine: str) -> None:
    """Each node's name leads to loopback or to a foreign address; ranks on both nodes train to the weights of one process.

    One of the nodes does not see the driver's temporary folder; no file is left on either.
    """
    found = cluster.command(engine, "test", "--num-workers", "2", "--placement-strategy", "STRICT_SPREAD")
    assert found["ok"]
    assert {worker["node_ip"] for worker in found["report"]["workers"]} == {cluster.head.ip, cluster.other.ip}
    assert "Gloo over eth0" in found["report"]["rendezvous"]["reason"]
    assert not list((cluster.folder / "tmp").glob("ray_fracbackend*"))


@pytest.mark.full
def test_t9_an_offline_machine_with_a_debian_hosts_file_trains() -> None:
    """Without any network except loopback Ray's address of the node is 127.0.1.1; one node needs no other."""
    node = Node(f"rfb-{os.getpid()}-{uuid.uuid4().hex[:6]}-c", "offline", 3)
    try:
        node.hosts("127.0.1.1 offline")
        command = node.command(sys.executable, "-m", "ray_fracbackend", "test", "--num-workers", "2", "--json")
        environment = {**node.environment(), "RAY_TRAIN_V2_ENABLED": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(done.stdout)["report"]
        assert {worker["node_ip"] for worker in report["workers"]} == {"127.0.1.1"}
        assert report["rendezvous"]["reason"].startswith("rank 0 at 127.0.0.1:")
    finally:
        node.close()
