"""Plan the rendezvous: address and port of rank 0's store, and Gloo's interface of every rank.

Example: two nodes, rank 0 on 10.0.0.3, whose host names resolve to 127.0.1.1 as on Debian::

    rank 0 at 10.0.0.3:41235 (its node's address), Gloo over eth0 (rank 0), over ens5 (rank 1)

The user's settings always take precedence; if they conflict with these rules, there is a warning. NCCL finds its
interfaces itself: a start never sets an NCCL variable for them. docs/windows.md describes the rules of each system.
The address is always a literal IP, because c10d would look up a host name repeatedly:

========================  ==============================================================================
``master_addr`` is set    as configured; a host name is replaced by the address that it resolves to on each rank
all ranks on one node     loopback
otherwise                 Ray's address of rank 0's node; an error if it is a loopback address
========================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_fracbackend.decide.addresses import bracketed, is_loopback, owner_of
from ray_fracbackend.decide.backends import parse_backend
from ray_fracbackend.decide.interfaces import choose_interfaces, interfaces_text
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text
from ray_fracbackend.errors import RendezvousError

# Set by torchrun, and inherited by the processes that its script starts.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# c10d tries IPv6 first, and a Windows IPv6 socket cannot reach an IPv4 address. Then c10d connects over IPv4.
NOTE_10049 = (
    "on Windows c10d logs 'The client socket has failed to connect to [...] (system error: 10049 ...)', or 10051, at times with a "
    "foreign host name, before it connects over IPv4: this line is expected and harmless"
)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Rendezvous of all ranks.

    Attributes:
        master_addrs: Address of rank 0's store for each rank, by rank; literal IPs.
        master_port: Port of that store.
        init_method: ``env`` or ``tcp``.
        one_node: Whether all ranks share one loopback interface.
        interfaces: Gloo's interface of every rank, by rank, None where Gloo finds one itself; empty if Gloo is not used.
        reason: The choice in one line, as logged.
        warnings: Conflicting settings and risks, one line each.
    """

    master_addrs: tuple[str, ...]
    master_port: int
    init_method: str
    one_node: bool
    interfaces: tuple[str | None, ...] = ()
    reason: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def master_addr(self) -> str:
        """Address of rank 0's store on rank 0 itself."""
        return self.master_addrs[0]

    @property
    def address(self) -> str:
        """Address and port of that store."""
        return f"{bracketed(self.master_addr)}:{self.master_port}"

    def env_of(self, worker: WorkerInfo) -> dict[str, str]:
        """Return the variables to set in one worker, overriding the user's."""
        env: dict[str, str] = {}
        if self.init_method == "env":
            env = {"MASTER_ADDR": self.master_addrs[worker.rank], "MASTER_PORT": str(self.master_port)}
        if worker.platform == "win32":  # no torch for Windows has a libuv store
            env["USE_LIBUV"] = "0"
        return env


def plan_rendezvous(
    workers: Sequence[WorkerInfo], settings: Settings, backend: str, store_port: int | None
) -> Rendezvous:
    """Plan the rendezvous of all ranks. O(number of workers).

    Args:
        workers: Every rank, in rank order, at least one.
        settings: The user's settings.
        backend: The chosen backend.
        store_port: Port of the store that rank 0 holds open, None if there is none.

    Raises:
        RendezvousError: Rank 0 has no open store, or no address of it works for all ranks.
    """
    if store_port is None:
        raise RendezvousError("rank 0 holds no store open: none was created when the workers were probed.")
    one_node = is_one_node(workers)
    addresses, origin = _rank0_addresses(workers, settings, one_node)
    warnings: tuple[str, ...] = ()
    if _is_foreign(workers[0], addresses[0]):
        known = "; ".join(f"{name} {','.join(found)}" for name, found in workers[0].network.interfaces.items())
        warnings = (
            f"rank 0's address {addresses[0]} ({origin}) is on no interface of its node ({known}). If it is the translated address of "
            "a container, run the containers with --network host: Gloo listens on random ports",
        )
    reason = f"rank 0 at {bracketed(addresses[0])}:{store_port} ({origin})"
    interfaces: tuple[str | None, ...] = ()
    if parse_backend(backend).connects_with_gloo:
        interfaces, doubts = choose_interfaces(workers, one_node)
        reason += f", Gloo {interfaces_text(workers, interfaces)}"
        warnings += doubts
    return Rendezvous(
        master_addrs=addresses,
        master_port=store_port,
        init_method=settings.init_method,
        one_node=one_node,
        interfaces=interfaces,
        reason=reason,
        warnings=warnings,
    )


def is_one_node(workers: Sequence[WorkerInfo]) -> bool:
    """Return True if all ranks share one loopback: one Ray node, or several on one machine with one address.

    The network id is not enough: machines that were restored from one snapshot have equal boot ids and namespaces.
    """
    if len({worker.node_id for worker in workers}) == 1:
        return True
    networks = {worker.network.network_id for worker in workers}
    return len({worker.node_ip for worker in workers}) == 1 and len(networks) == 1 and "" not in networks


def _rank0_addresses(workers: Sequence[WorkerInfo], settings: Settings, one_node: bool) -> tuple[tuple[str, ...], str]:
    """Return the address of rank 0's store for each rank, and the source for the log."""
    first = workers[0]
    if settings.master_addr is not None:
        _refuse(
            [worker for worker in workers if worker.network.master_addr_missing],
            f"master_addr={settings.master_addr!r} cannot be resolved by",
            "It must resolve to rank 0's node everywhere; use an IP address of it.",
        )
        resolved = (worker.network.master_addrs for worker in workers)
        return tuple(each[0] if each else settings.master_addr for each in resolved), "master_addr as configured"
    if one_node:
        return ("::1" if _is_foreign(first, "127.0.0.1") else "127.0.0.1",) * len(workers), "one node"
    _refuse(
        [worker for worker in workers if is_loopback(worker.node_ip)],
        "Ray knows several nodes of this job, and only a loopback address of",
        "Start each Ray node with --node-ip-address of an interface that the others reach; on Windows and macOS also set "
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 for every Ray process.",
    )
    return (first.node_ip,) * len(workers), "its node's address"


def _refuse(workers: Sequence[WorkerInfo], found: str, advice: str) -> None:
    if not workers:
        return
    ranks = [worker.rank for worker in workers]
    where = ", ".join(f"{w.where}: {w.network.master_addr_missing or w.node_ip}" for w in workers[:4])
    raise RendezvousError(f"{found} {ranks_text(ranks)} ({where}).", advice=advice, ranks=ranks)


def _is_foreign(worker: WorkerInfo, address: str) -> bool:
    """Return whether no interface of the worker's node has the address; False if its interfaces are unknown."""
    interfaces = worker.network.interfaces
    return bool(interfaces) and owner_of(interfaces, address) is None
