"""Where and how the ranks meet: address, port, URL, Gloo's interface of every rank, libuv. Pure; driver or controller.

Example: two nodes, rank 0 on 10.0.0.3, whose host names resolve to 127.0.1.1 as Debian sets them::

    rank 0 at 10.0.0.3:41235 (its node's address), Gloo over eth0 (rank 0), ens5 (rank 1)

An explicit setting of the user always wins, and a conflict with these rules is a warning. The rows that the comments
name are those of the table in docs/windows.md. NCCL finds its interfaces itself: no NCCL variable is ever set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ray_fracbackend.errors import RendezvousError
from ray_fracbackend.facts import WorkerFacts, ranks_text
from ray_fracbackend.interfaces import (
    IFNAME,
    InterfaceChoice,
    choose_interfaces,
    is_link_local,
    is_loopback,
    owner_of,
)
from ray_fracbackend.options import StartOptions

# c10d tries IPv6 first, and a Windows IPv6 socket does not take the IPv4 address in it; then it connects over IPv4.
NOTE_10049 = (
    "on Windows c10d logs 'The client socket has failed to connect to [...] (system error: 10049 ...)', at times with a "
    "foreign host name, before it connects over IPv4: this line is expected and harmless"
)


@dataclass(frozen=True, kw_only=True)
class WorkerRendezvous:
    """How one rank meets the others.

    Attributes:
        master_addr: Address of rank 0's store as this rank reaches it, a literal IP without brackets.
        master_port: Port of that store.
        init_url: URL for torch's rendezvous.
        env: Variables to set before it.
        start_env: Variables to set before it and to remove once the group is verified.
        interface_by_route: Find ``GLOO_SOCKET_IFNAME`` on the worker: the interface of its route to rank 0.
        uses_gloo: Gloo connects the ranks.
        check_device: Gloo's device is in doubt, so it is tried before anybody waits.
        check_reachable: Rank 0 may be on another machine, so the connection is checked first.
    """

    master_addr: str
    master_port: int
    init_url: str
    env: Mapping[str, str] = field(default_factory=dict)
    start_env: Mapping[str, str] = field(default_factory=dict)
    interface_by_route: bool = False
    uses_gloo: bool = False
    check_device: bool = False
    check_reachable: bool = False


@dataclass(frozen=True, kw_only=True)
class RendezvousPlan:
    """Where all ranks meet.

    Attributes:
        master_addrs: Address of rank 0's store as each rank reaches it, by rank; literal IPs.
        master_port: Port of that store.
        init_method: ``env`` or ``tcp``.
        one_node: All ranks share one loopback interface.
        uses_gloo: Gloo connects the ranks.
        interfaces: Gloo's interface of every rank, by rank; empty where Gloo is not used.
        libuv_off: The store must not use libuv.
        on_linux: The workers run on Linux.
        reason: The choice in one line, as logged.
        notes: What the log will show and nobody needs to act on.
        warnings: Settings that are in conflict and doubts, one line each.
    """

    master_addrs: tuple[str, ...]
    master_port: int
    init_method: str
    one_node: bool
    uses_gloo: bool
    interfaces: tuple[InterfaceChoice, ...] = ()
    libuv_off: bool = False
    on_linux: bool = True
    reason: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def master_addr(self) -> str:
        """Address of rank 0's store as rank 0 itself knows it."""
        return self.master_addrs[0]

    def of(self, rank: int) -> WorkerRendezvous:
        """The part of one rank."""
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
            init_url=init_url(self.init_method, address, self.master_port, libuv_off=self.libuv_off),
            env=env,
            start_env=interface if choice.start_only else {},
            interface_by_route=choice.by_route,
            uses_gloo=self.uses_gloo,
            # Elsewhere than on Linux names and addresses of interfaces are as Gloo sees them only by and large.
            check_device=self.uses_gloo and (not self.on_linux or choice.name is None or choice.by_user),
            check_reachable=not self.one_node,
        )


def bracketed(address: str) -> str:
    """A literal IP as it stands before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def init_url(init_method: str, address: str, port: int, *, libuv_off: bool) -> str:
    """``env://`` or ``tcp://10.0.0.3:29500``.

    Args:
        init_method: ``env`` or ``tcp``.
        address: Literal IP of rank 0's node.
        port: Port of rank 0's store.
        libuv_off: Say so in the URL, where it wins over an inherited ``USE_LIBUV``.
    """
    host = bracketed(address)
    base = "env://" if init_method == "env" else f"tcp://{host}:{port}"
    return f"{base}?use_libuv=0" if libuv_off else base


def plan_rendezvous(workers: Sequence[WorkerFacts], options: StartOptions, backend: str) -> RendezvousPlan:
    """Decides where and how the ranks meet. O(number of workers).

    Args:
        workers: Facts of every rank, in rank order, at least one; rank 0 holds a store open.
        options: What the user asked for.
        backend: The backend that was decided on.

    Raises:
        RendezvousError: No address of rank 0 can work for all ranks, or Gloo has no interface that can.
    """
    windows = workers[0].platform == "win32"
    one_node = is_one_node(workers)
    port = workers[0].network.store_port
    if port is None:
        raise RendezvousError("rank 0 holds no store open: it was not asked for one when the workers were probed.")
    addresses, origin, warnings = _addresses(workers, options, one_node)
    uses_gloo = "gloo" in backend or backend == "ipc"
    interfaces: tuple[InterfaceChoice, ...] = ()
    gloo = ""
    if uses_gloo:
        interfaces, doubts = choose_interfaces(workers, one_node, addresses)
        warnings += doubts
        gloo = f", Gloo {_over(interfaces)}"
    host = bracketed(addresses[0])
    silent = [worker for worker in workers if worker.network.name_server_silent]
    return RendezvousPlan(
        master_addrs=addresses,
        master_port=port,
        init_method=options.init_method,
        one_node=one_node,
        uses_gloo=uses_gloo,
        interfaces=interfaces,
        libuv_off=windows,
        on_linux=workers[0].platform == "linux",
        reason=f"rank 0 at {host}:{port} ({origin}){gloo}{', libuv off' if windows else ''}",
        notes=(NOTE_10049,) if windows else (),
        warnings=(*warnings, *_overridden_env(workers, windows), *_silent(silent)),
    )


def is_one_node(workers: Sequence[WorkerFacts]) -> bool:
    """True where all ranks share one loopback: one Ray node, or Ray nodes side by side on one machine under one address.

    The network's id alone does not tell: machines that were restored from one snapshot have equal boot ids and namespaces.
    """
    if len({worker.node_id for worker in workers}) == 1:
        return True
    networks = {worker.network.network_id for worker in workers}
    return len({worker.node_ip for worker in workers}) == 1 and len(networks) == 1 and "" not in networks


_Addresses = tuple[tuple[str, ...], str, tuple[str, ...]]


def _addresses(workers: Sequence[WorkerFacts], options: StartOptions, one_node: bool) -> _Addresses:
    """Rank 0's address as each rank reaches it, where it comes from, and warnings."""
    if options.master_addr is not None:  # rows 6 and 10
        return _configured(workers, options.master_addr, one_node)
    if one_node:  # rows 1, 3 and 7
        return (_loopback(workers[0]),) * len(workers), "one node", ()
    address, warnings = _node_address(workers)
    return (address,) * len(workers), "its node's address", warnings


def _configured(workers: Sequence[WorkerFacts], value: str, one_node: bool) -> _Addresses:
    lost = [worker for worker in workers if worker.network.master_addr_missing]
    if lost:
        where = ", ".join(worker.where for worker in lost[:4])
        raise RendezvousError(
            f"master_addr={value!r} cannot be resolved by {ranks_text([worker.rank for worker in lost])} ({where}: "
            f"{lost[0].network.master_addr_missing}). It must mean rank 0's node everywhere; use an IP address of it.",
            ranks=[worker.rank for worker in lost],
        )
    addresses = tuple(worker.network.master_addrs[0] if worker.network.master_addrs else value for worker in workers)
    node_id = workers[0].node_id
    away = [
        w.rank for w, address in zip(workers, addresses, strict=True) if is_loopback(address) and w.node_id != node_id
    ]
    warnings: tuple[str, ...] = ()
    if away and not one_node:
        warnings = (
            f"master_addr={value!r} is a loopback address for {ranks_text(away)} on other nodes; it is used as asked",
        )
    elif workers[0].network.interfaces and owner_of(workers[0], addresses[0]) is None:
        warnings = (
            f"master_addr={value!r} is on no interface of rank 0's node {workers[0].node_ip}; it is used as asked",
        )
    return addresses, "master_addr as configured", warnings


def _loopback(worker: WorkerFacts) -> str:
    known = worker.network.interfaces
    for address in ("127.0.0.1", "::1"):
        if not known or owner_of(worker, address) is not None:
            return address
    return worker.node_ip


def _node_address(workers: Sequence[WorkerFacts]) -> tuple[str, tuple[str, ...]]:
    """Rows 2, 4, 5 and 8: the address of rank 0's node that Ray knows, where it can be used from other nodes."""
    first = workers[0]
    loopback = [worker for worker in workers if is_loopback(worker.node_ip)]
    if loopback:
        raise RendezvousError(_loopback_text(loopback), ranks=[worker.rank for worker in loopback])
    address = first.node_ip
    if is_link_local(address):  # needs a scope, which differs from node to node
        name = owner_of(first, address)
        others = [a for a in first.network.interfaces.get(name or "", ()) if not is_link_local(a)]
        if not others:
            raise RendezvousError(
                f"rank 0's node address {address} is link-local and its interface has no other. Other nodes cannot use "
                "it; start that Ray node with --node-ip-address, or set FracTorchConfig(master_addr=...).",
                ranks=(first.rank,),
            )
        address = others[0]
    if not first.network.interfaces or owner_of(first, address) is not None:
        return address, ()
    found = f"rank 0's node address {address} is on none of its interfaces ({_listed(first)})"
    if first.platform == "win32":
        raise RendezvousError(
            f"{found}. Start Ray on that node with --node-ip-address of an interface that the others reach, and with "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 on every node, or set FracTorchConfig(master_addr=...).",
            ranks=(first.rank,),
        )
    return address, (
        f"{found}: a translated address, as in a container with a bridge. Gloo listens on random ports; run the "
        "containers with --network host",
    )


def _loopback_text(loopback: Sequence[WorkerFacts]) -> str:
    where = ", ".join(f"rank {worker.rank} on node {worker.node_ip}" for worker in loopback[:4])
    found = f"Ray knows several nodes of this job, and some only by a loopback address ({where})"
    if loopback[0].platform in ("win32", "darwin"):
        return (
            f"{found}. Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 for every Ray process on every node before `ray start`: "
            "without it Ray on Windows and macOS serves one machine."
        )
    return f"{found}. Start each Ray node with --node-ip-address of an interface that the others reach."


def _listed(worker: WorkerFacts) -> str:
    shown = [f"{name} {','.join(addresses)}" for name, addresses in list(worker.network.interfaces.items())[:6]]
    return "; ".join(shown)


def _over(interfaces: Sequence[InterfaceChoice]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, choice in enumerate(interfaces):
        ranks_of.setdefault(choice.text, []).append(rank)
    if len(ranks_of) == 1:
        return next(iter(ranks_of))
    shown = [f"{text} ({ranks_text(ranks)})" for text, ranks in list(ranks_of.items())[:4]]
    return ", ".join(shown) + (", ..." if len(ranks_of) > 4 else "")


def _silent(workers: Sequence[WorkerFacts]) -> tuple[str, ...]:
    if not workers:
        return ()
    nodes = list(dict.fromkeys(worker.node_ip for worker in workers))
    where = f"node {', '.join(nodes[:4])}{', ...' if len(nodes) > 4 else ''}"
    return (
        f"the name server of {where} does not answer ({ranks_text([worker.rank for worker in workers])}): c10d asks it for the "
        "name of every peer, so each connection takes seconds; correct /etc/resolv.conf there",
    )


def _overridden_env(workers: Sequence[WorkerFacts], windows: bool) -> tuple[str, ...]:
    """Inherited variables that would break the start and are therefore not kept."""
    found = []
    libuv = [worker.rank for worker in workers if worker.env.get("USE_LIBUV") == "1"]
    if windows and libuv:
        found.append(f"USE_LIBUV=1 on {ranks_text(libuv)} is not kept: no torch for Windows has a libuv store")
    agent = [worker.rank for worker in workers if "TORCHELASTIC_USE_AGENT_STORE" in worker.env]
    if agent:
        found.append(
            f"TORCHELASTIC_USE_AGENT_STORE on {ranks_text(agent)} is removed: no elastic agent runs these workers"
        )
    return tuple(found)
