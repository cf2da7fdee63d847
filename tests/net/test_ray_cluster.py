"""A real Ray cluster of two nodes with wrong host names: stock Ray Train fails on it, FracTorchConfig trains."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from net_nodes import HERE, Node, network

GCS_PORT = 6379
# Time limit for stock's failure, with timeout_s=5 and the start of a driver; with its default of 1800 s it would hang.
STOCK_S = 100.0


class Cluster:
    """Two connected nodes with Ray on each."""

    def __init__(self, head: Node, other: Node, folder: Path) -> None:
        self.head, self.other, self.folder = head, other, folder

    def start(self) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        common = ["--num-cpus=2", '--resources={"slot": 1}', "--object-store-memory=80000000", "--disable-usage-stats"]
        head = [f"--node-ip-address={self.head.ip}", f"--port={GCS_PORT}", "--head", "--include-dashboard=false"]
        other = [f"--node-ip-address={self.other.ip}", f"--address={self.head.ip}:{GCS_PORT}"]
        # The temporary folder of the drivers is the head node's own.
        (self.folder / "tmp").mkdir()
        own_folder = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {self.folder}/tmp && exec "$@"', "sh"]
        for node, prefix, args in (
            (self.head, [], [*head, f"--temp-dir={self.folder}/ray"]),
            (self.other, own_folder, other),
        ):
            code = self._run(node, [*prefix, ray, "start", *args, *common], 60)
            assert code == 0, (self.folder / "log").read_text()[-5000:]

    def fit(self, name: str) -> dict[str, Any]:
        """Return the result of a fit; each has its own driver, at whose end Ray releases what a failed fit holds."""
        code = self._run(self.head, self._driver(name), 120)
        assert code == 0, (self.folder / "log").read_text()[-5000:]
        return json.loads((self.folder / f"{name}.json").read_text())

    def trains_before(self, name: str, text: str, timeout_s: float) -> bool:
        """Return whether a fit started training before the log contained `text`, within the given time."""
        trained, log = self.folder / "trained.json", self.folder / "log"
        trained.unlink(missing_ok=True)
        start = log.stat().st_size
        self._run(self.head, self._driver(name), timeout_s, lambda: text in log.read_bytes()[start:].decode())
        assert text in log.read_bytes()[start:].decode()
        return trained.exists()

    def command(self, engine: str, *arguments: str) -> dict[str, Any]:
        """Return the JSON document of one of our commands on the head node."""
        code = self._run(
            self.head,
            [
                "sh",
                "-c",
                '"$@" >"$0"',
                str(self.folder / "json"),
                sys.executable,
                "-m",
                "ray_fracbackend",
                *arguments,
                "--json",
            ],
            300,
            TMPDIR=str(self.folder / "tmp"),
            RAY_TRAIN_V2_ENABLED=engine,
        )
        assert code == 0, (self.folder / "log").read_text()[-5000:]
        return json.loads((self.folder / "json").read_text())

    def _driver(self, name: str) -> list[str]:
        return [sys.executable, str(HERE / "net_cluster_driver.py"), str(self.folder), name]

    def _run(
        self,
        node: Node,
        command: list[str],
        timeout_s: float,
        enough: Callable[[], bool] = lambda: False,
        **settings: str,
    ) -> int | None:
        """Return the exit code, None if the command was killed because it was enough or took too long."""
        environment = {**node.environment(), "RAY_TRAIN_V2_ENABLED": "1", **settings}
        if "start" not in command:
            environment["RAY_ADDRESS"] = f"{self.head.ip}:{GCS_PORT}"
        with open(self.folder / "log", "ab") as log:
            started = subprocess.Popen(node.command(*command), stdout=log, stderr=log, env=environment)
            end = time.monotonic() + timeout_s
            while time.monotonic() < end and not enough():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return started.wait(0.5)
            started.kill()
            started.wait(10)
            return None


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
def test_trains_where_host_names_resolve_wrongly(cluster: Cluster) -> None:
    """Each node's name leads to loopback or to a foreign address: ours trains, stock's Gloo cannot connect."""
    ours = cluster.fit("ours")
    assert ours["error"] is None
    assert ours["trained"]["equal_gradients"]
    assert ours["trained"]["nodes"] == [cluster.head.ip, cluster.other.ip]
    assert "Gloo over eth0" in ours["trained"]["rendezvous"]
    assert not cluster.trains_before("stock", "connectFullMesh failed", STOCK_S)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["1", "0"], ids=["V2", "V1"])
def test_the_command_needs_no_shared_storage(cluster: Cluster, engine: str) -> None:
    """A run on two nodes, of which one does not see the driver's temporary folder; no file is left on either."""
    found = cluster.command(engine, "test", "--num-workers", "2", "--placement-strategy", "STRICT_SPREAD")
    assert {worker["node_ip"] for worker in found["report"]["workers"]} == {cluster.head.ip, cluster.other.ip}
    assert not list((cluster.folder / "tmp").glob("ray_fracbackend*"))


@pytest.mark.full
def test_t9_an_offline_machine_with_a_debian_hosts_file_trains() -> None:
    """Without any network except loopback Ray's address of the node is 127.0.1.1; one node needs no other."""
    folder = Path(tempfile.mkdtemp(prefix="rfb-"))
    node = Node(f"rfb-{os.getpid()}-{uuid.uuid4().hex[:6]}-c", "offline", 3)
    try:
        node.hosts("127.0.1.1 offline")
        command = [sys.executable, str(HERE / "net_cluster_driver.py"), str(folder), "ours"]
        environment = {**node.environment(), "RAY_TRAIN_V2_ENABLED": "1"}
        done = subprocess.run(
            node.command(*command), capture_output=True, text=True, env=environment, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        ours = json.loads((folder / "ours.json").read_text())
        assert ours["error"] is None
        assert ours["trained"]["equal_gradients"]
        assert ours["trained"]["nodes"] == ["127.0.1.1"]
        assert ours["trained"]["rendezvous"].startswith("rank 0 at 127.0.0.1:")
    finally:
        node.close()
        shutil.rmtree(folder, ignore_errors=True)
