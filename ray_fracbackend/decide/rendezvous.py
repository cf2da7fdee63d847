"""Plan the rendezvous: address and port of rank 0's store, Gloo's interface of every rank, libuv.

Example: two nodes, rank 0 on 10.0.0.3, whose host names resolve to 127.0.1.1 as on Debian::

    rank 0 at 10.0.0.3:41235 (its node's address), Gloo over eth0 (rank 0), over ens5 (rank 1)

The user's settings always take precedence; if they conflict with these rules, there is a warning. NCCL finds its
interfaces itself: a start never sets an NCCL variable for them. rank0_address.py chooses the address, gloo_interface.py
the interfaces. docs/windows.md describes the rules of each system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ray_fracbackend.decide.addresses import bracketed
from ray_fracbackend.decide.backends import parse_backend
from ray_fracbackend.decide.gloo_interface import InterfaceChoice, choose_interfaces, interfaces_text
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.decide.rank0_address import rank0_addresses
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text
from ray_fracbackend.errors import FracBackendError, RendezvousError

# Set by torchrun, and inherited by the processes that its script starts.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# c10d tries IPv6 first, and a Windows IPv6 socket cannot reach an IPv4 address. Then c10d connects over IPv4.
NOTE_10049 = (
    "on Windows c10d logs 'The client socket has failed to connect to [...] (system error: 10049 ...)', or 10051, at times with a "
    "foreign host name, before it connects over IPv4: this line is expected and harmless"
)


@dataclass(frozen=True, kw_only=True)
class WorkerRendezvous:
    """Rendezvous of one rank.

    Attributes:
        master_addr: Address of rank 0's store for this rank, a literal IP without brackets.
        master_port: Port of that store.
        env: Variables to set, overriding the user's.
        start_env: Variables to set for the start and to remove after the verification.
        interface_by_route: Whether the worker finds ``GLOO_SOCKET_IFNAME``: the interface of its route to rank 0.
        check_device: Whether to create Gloo's device once before any rank waits, because it may not work.
        check_reachable: Whether to check the connection to rank 0's store first.
        address_doubt: As in `Rendezvous`.
    """

    master_addr: str
    master_port: int
    env: Mapping[str, str] = field(default_factory=dict)
    start_env: Mapping[str, str] = field(default_factory=dict)
    interface_by_route: bool = False
    check_device: bool = False
    check_reachable: bool = False
    address_doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Rendezvous of all ranks.

    Attributes:
        master_addrs: Address of rank 0's store for each rank, by rank; literal IPs.
        master_port: Port of that store.
        init_method: ``env`` or ``tcp``.
        one_node: Whether all ranks share one loopback interface.
        uses_gloo: Whether Gloo connects the ranks.
        interfaces: Gloo's interface of every rank, by rank; empty if Gloo is not used.
        libuv_off: Whether the store must not use libuv.
        on_linux: Whether the workers run on Linux.
        check_reachable: Whether ranks may be unable to reach rank 0's store: it is on another machine, or the user set its address.
        address_doubt: The warning about the configured address of rank 0's store, empty without one.
        reason: The choice in one line, as logged.
        warnings: Conflicting settings and risks, one line each.
    """

    master_addrs: tuple[str, ...]
    master_port: int
    init_method: str
    one_node: bool
    uses_gloo: bool
    interfaces: tuple[InterfaceChoice, ...] = ()
    libuv_off: bool = False
    on_linux: bool = True
    check_reachable: bool = False
    address_doubt: str = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def master_addr(self) -> str:
        """Address of rank 0's store on rank 0 itself."""
        return self.master_addrs[0]

    def __str__(self) -> str:
        from ray_fracbackend.decide.texts import rendezvous_text

        return rendezvous_text(self)

    def of(self, rank: int) -> WorkerRendezvous:
        """Return the part of one rank."""
        address, choice = self.master_addrs[rank], self.interfaces[rank] if self.interfaces else InterfaceChoice()
        env: dict[str, str] = {}
        if self.init_method == "env":
            env = {"MASTER_ADDR": address, "MASTER_PORT": str(self.master_port)}
        if self.libuv_off:
            env["USE_LIBUV"] = "0"
        interface = {IFNAME: choice.name} if choice.name is not None and not choice.by_user else {}
        if not choice.start_only:
            env |= interface
        return WorkerRendezvous(
            master_addr=address,
            master_port=self.master_port,
            env=env,
            start_env=interface if choice.start_only else {},
            interface_by_route=choice.by_route,
            # Except on Linux, Gloo may use other names and addresses of interfaces than psutil.
            check_device=self.uses_gloo and (not self.on_linux or choice.name is None or choice.by_user),
            # Rank 0 has the store itself, and may not be able to reach its own address from inside.
            check_reachable=self.check_reachable and rank > 0,
            address_doubt=self.address_doubt,
        )


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
        RendezvousError: Rank 0 has no open store, no address of it works for all ranks, or the ranks would use Gloo
            addresses of different families.
        BackendUnavailableError: Gloo finds no network device on a Windows node.
    """
    windows = workers[0].platform == "win32"
    one_node = is_one_node(workers)
    if store_port is None:
        raise RendezvousError("rank 0 holds no store open: none was created when the workers were probed.")
    addresses, origin, warnings = rank0_addresses(workers, settings, one_node)
    is_configured = settings.master_addr is not None
    doubt = warnings[0] if is_configured and warnings else ""
    warnings += _foreign_settings(workers)
    uses_gloo = parse_backend(backend).connects_with_gloo
    interfaces: tuple[InterfaceChoice, ...] = ()
    gloo = ""
    if uses_gloo:
        try:
            interfaces, doubts = choose_interfaces(workers, one_node)
        except FracBackendError as error:
            raise error.with_warnings(warnings) from None
        warnings += doubts
        gloo = f", Gloo {interfaces_text(interfaces)}"
    host = bracketed(addresses[0])
    return Rendezvous(
        master_addrs=addresses,
        master_port=store_port,
        init_method=settings.init_method,
        one_node=one_node,
        uses_gloo=uses_gloo,
        interfaces=interfaces,
        libuv_off=windows,
        on_linux=workers[0].platform == "linux",
        check_reachable=is_configured or not one_node,
        address_doubt=doubt,
        reason=f"rank 0 at {host}:{store_port} ({origin}){gloo}{', libuv off' if windows else ''}",
        warnings=warnings,
    )


def _foreign_settings(workers: Sequence[WorkerInfo]) -> tuple[str, ...]:
    """Return warnings about variables that the start does not keep, and about systems that Gloo does not connect with each other."""
    warnings = []
    libuv = [worker.rank for worker in workers if worker.env.get("USE_LIBUV") == "1"]
    if libuv and workers[0].platform == "win32":
        warnings.append(f"USE_LIBUV=1 on {ranks_text(libuv)} is not kept: torch for Windows is built without libuv")
    agents = [worker.rank for worker in workers if worker.env.get(AGENT_STORE) == "True"]
    if agents:
        warnings.append(
            f"{AGENT_STORE}=True on {ranks_text(agents)} is not kept: torchrun sets it for its own workers, and every rank of a "
            "group that the train function creates would wait for the store of a torchrun agent that does not exist"
        )
    macs = [worker.rank for worker in workers if worker.platform == "darwin"]
    if macs and len(macs) < len(workers):
        warnings.append(
            f"macOS on {ranks_text(macs)}, Linux on the others: Gloo between them is reported to hang (gloo#268); place all workers "
            "on nodes of one system"
        )
    return tuple(warnings)


def is_one_node(workers: Sequence[WorkerInfo]) -> bool:
    """Return True if all ranks share one loopback: one Ray node, or several on one machine with one address.

    The network id is not enough: machines that were restored from one snapshot have equal boot ids and namespaces.
    """
    if len({worker.node_id for worker in workers}) == 1:
        return True
    networks = {worker.network.network_id for worker in workers}
    return len({worker.node_ip for worker in workers}) == 1 and len(networks) == 1 and "" not in networks
