"""Nodes in network namespaces, connected by a switch, each with its own host name, hosts file and sysctls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, TextIO, cast

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str | None:
    if sys.platform != "linux":
        return "network namespaces are a Linux feature"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs the commands ip (package iproute2) and unshare"
    name = f"rfb-try-{uuid.uuid4().hex[:8]}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "exec", name, "unshare", "--uts", "true")
    except RuntimeError as error:
        return f"network namespaces are not allowed here ({error})"
    finally:
        run("ip", "netns", "del", name, check=False)
    return None


class Worker:
    """One process on a node; it calls functions of net_calls there."""

    def __init__(self, node: Node, listener: Listener, log: Path) -> None:
        self.node, self.log = node, log
        self._connection = listener.accept()
        self.pid = self._connection.recv()

    def send(self, function: Callable[..., Any], *args: Any, **env: str) -> None:
        self._connection.send((function.__module__, function.__name__, args, env))

    def answer(self, end: float) -> Any:
        """Return the answer, an exception that the call raised, or a TimeoutError if it hangs past ``end``."""
        if not self._connection.poll(max(0.0, end - time.monotonic())):
            return TimeoutError("hangs")
        try:
            return self._connection.recv()[1]
        except EOFError:
            return RuntimeError("the process died")

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 30, **env: str) -> Any:
        self.send(function, *args, **env)
        found = self.answer(time.monotonic() + timeout_s)
        if isinstance(found, BaseException):
            raise found
        return found

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        self._connection.close()


class Node:
    """One namespace, its configuration files and the agent in it."""

    def __init__(self, name: str, hostname: str, number: int) -> None:
        self.name, self.hostname = name, hostname
        self.ip, self.ip6 = f"10.77.0.{number}", f"fd77::{number}"
        self.workers: list[Worker] = []
        self._etc = Path("/etc/netns") / name
        self._etc.mkdir(parents=True)
        self.hosts()
        self.name_server(None)
        run("ip", "netns", "add", name)
        self.ip_command("link", "set", "lo", "up")
        self._agent: subprocess.Popen[str] | None = None
        self._ready = False
        self._lock = threading.Lock()

    def ip_command(self, *args: str) -> str:
        return run("ip", "-n", self.name, *args)

    def execute(self, *command: str, check: bool = True) -> str:
        return run("ip", "netns", "exec", self.name, *command, check=check)

    def sysctl(self, **values: int) -> None:
        for key, value in values.items():
            self.execute("sysctl", "-qw", f"net.ipv6.{key.replace('__', '.')}={value}")

    def hosts(self, *lines: str) -> None:
        """Rewrite the hosts file in place; by default the host name has the node's real address."""
        own = lines or (f"{self.ip} {self.hostname}",)
        (self._etc / "hosts").write_text("\n".join((*own, "127.0.0.1 localhost", "::1 localhost", "")))

    def name_server(self, address: str | None) -> None:
        """Rewrite the resolver's files in place; by default there is no name server."""
        (self._etc / "nsswitch.conf").write_text("hosts: files dns\n" if address else "hosts: files\n")
        (self._etc / "resolv.conf").write_text(f"nameserver {address}\n" if address else "")

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(HERE), str(REPOSITORY)])
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("GLOO_", "NCCL_", "MASTER_", "USE_LIBUV", "RAY_"))
        }
        return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}

    def command(self, *command: str) -> list[str]:
        """Return a command in the namespace and under the node's host name."""
        name = ["unshare", "--uts", "sh", "-c", f'hostname {self.hostname} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.name, *name, *command]

    def start_agent(self) -> None:
        self._agent = subprocess.Popen(
            self.command(sys.executable, str(HERE / "net_agent.py"), self.hostname),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(),
        )

    def spawn(self, folder: Path) -> Worker:
        """Start a new process on this node; may be called from several threads."""
        with self._lock:
            return self._spawn(folder)

    def _spawn(self, folder: Path) -> Worker:
        if self._agent is None:
            self.start_agent()
        agent = cast("subprocess.Popen[str]", self._agent)
        stdin, stdout = cast(TextIO, agent.stdin), cast(TextIO, agent.stdout)
        if not self._ready:
            assert stdout.readline().strip() == "ready"
            self._ready = True
        short = tempfile.mktemp(prefix="rfb-", suffix=".sock", dir=tempfile.gettempdir())
        log = folder / f"{uuid.uuid4().hex}.log"
        with Listener(short, "AF_UNIX") as listener:
            stdin.write(f"{short} {log}\n")
            stdin.flush()
            worker = Worker(self, listener, log)
        self.workers.append(worker)
        return worker

    def reset(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        self.hosts()
        self.name_server(None)
        self.sysctl(bindv6only=0, conf__all__disable_ipv6=0, conf__lo__disable_ipv6=0)
        if shutil.which("nft"):
            self.execute("nft", "flush", "ruleset")

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        if self._agent is not None:
            self._agent.kill()
            self._agent.wait(10)
        for pid in run("ip", "netns", "pids", self.name, check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        run("ip", "netns", "del", self.name, check=False)
        shutil.rmtree(self._etc, ignore_errors=True)


class Switch:
    """Connects any number of nodes by their eth0; it is in its own namespace."""

    def __init__(self, name: str, nodes: Sequence[Node]) -> None:
        self.name = name
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", name, "link", "set", "br0", "up")
        for number, node in enumerate(nodes):
            end = f"v{uuid.uuid4().hex[:8]}"
            run("ip", "link", "add", end, "type", "veth", "peer", "name", f"p{end}")
            run("ip", "link", "set", end, "netns", node.name, "name", "eth0")
            run("ip", "link", "set", f"p{end}", "netns", name, "name", f"port{number}")
            run("ip", "-n", name, "link", "set", f"port{number}", "master", "br0", "up")
            address(node, "eth0")

    def close(self) -> None:
        run("ip", "netns", "del", self.name, check=False)


@contextmanager
def network(num_nodes: int, hostname: str = "node", agents: bool = True) -> Iterator[tuple[list[Node], Switch]]:
    """Connect nodes to one switch; with agents they can spawn workers soon."""
    name = f"rfb-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    nodes: list[Node] = []
    switch = None
    try:
        nodes.extend(Node(f"{name}-{number}", f"{hostname}-{number}", number + 1) for number in range(num_nodes))
        switch = Switch(f"{name}-switch", nodes)
        for node in nodes if agents else ():
            node.start_agent()
        yield nodes, switch
    finally:
        for node in nodes:
            node.close()
        if switch is not None:
            switch.close()


def address(node: Node, interface: str) -> None:
    """Bring an interface up with the node's IPv4 and IPv6 address."""
    node.ip_command("link", "set", interface, "up")
    node.ip_command("addr", "replace", f"{node.ip}/24", "dev", interface)
    node.ip_command("addr", "replace", f"{node.ip6}/64", "dev", interface, "nodad")


@contextmanager
def own_interface(node: Node, name: str, network: str) -> Iterator[None]:
    """Have an interface that leads to the node itself, as of a bridge, a virtual switch or a VPN."""
    node.ip_command("link", "add", name, "type", "veth", "peer", "name", f"{name}-peer")
    node.ip_command("addr", "add", network, "dev", name)
    for end in (name, f"{name}-peer"):
        node.ip_command("link", "set", end, "up")
    try:
        yield
    finally:
        node.ip_command("link", "del", name)
