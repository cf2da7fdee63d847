"""Plan the rendezvous: address and port of rank 0's store, Gloo's interface of every rank, libuv.

Example: two nodes, rank 0 on 10.0.0.3, whose host names resolve to 127.0.1.1 as Debian sets them::

    rank 0 at 10.0.0.3:41235 (its node's address), Gloo over eth0 (rank 0), ens5 (rank 1)

An explicit setting of the user always wins, and a conflict with these rules is a warning. NCCL finds its interfaces itself:
no NCCL variable is ever set. Without the name of an interface Gloo takes the address that the node's own host name resolves
to, which on many machines is a loopback or foreign address; with one it takes the first address of that interface.
MASTER_ADDR has no effect on it. The rules of each system are in docs/windows.md.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ray_fracbackend.decide.backends import parse_backend
from ray_fracbackend.decide.interfaces import IFNAME, gloo_doubt
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text
from ray_fracbackend.errors import BackendUnavailableError, FracBackendError, RendezvousError, UnreachableMasterError

# torchrun's, which leaks into what a script that it runs starts.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Systems whose list of addresses may start with a link-local one; Linux lists IPv4, then the widest scope of IPv6 first.
_LINK_LOCAL_FIRST = ("win32", "darwin")
# c10d tries IPv6 first, and a Windows IPv6 socket does not take the IPv4 address in it; then it connects over IPv4.
NOTE_10049 = (
    "on Windows c10d logs 'The client socket has failed to connect to [...] (system error: 10049 ...)', or 10051, at times with a "
    "foreign host name, before it connects over IPv4: this line is expected and harmless"
)


@dataclass(frozen=True, kw_only=True)
class InterfaceChoice:
    """Gloo's interface on one rank.

    Attributes:
        name: Its name, None where Gloo finds one itself.
        by_user: The name is the user's own setting.
        by_route: The worker finds the name itself, from its route to rank 0.
        start_only: The name is removed after the start: groups that the train function makes later work without it.
    """

    name: str | None = None
    by_user: bool = False
    by_route: bool = False
    start_only: bool = False

    @property
    def text(self) -> str:
        """``over eth0``, for the log."""
        if self.by_route:
            return "over the interface of the route to rank 0"
        if self.name is None:
            return "over the host name's address"
        return f"over {self.name}{' as set by the user' if self.by_user else ''}"


@dataclass(frozen=True, kw_only=True)
class WorkerRendezvous:
    """Rendezvous of one rank.

    Attributes:
        master_addr: Address of rank 0's store as this rank reaches it, a literal IP without brackets.
        master_port: Port of that store.
        env: Variables to set, also where the user set them.
        start_env: Variables to set for the start and to remove once the group is verified.
        interface_by_route: Find ``GLOO_SOCKET_IFNAME`` on the worker: the interface of its route to rank 0.
        check_device: Gloo's device may not work, so it is created once before any rank waits.
        check_reachable: Rank 0 may be on another machine, so the connection is checked first.
    """

    master_addr: str
    master_port: int
    env: Mapping[str, str] = field(default_factory=dict)
    start_env: Mapping[str, str] = field(default_factory=dict)
    interface_by_route: bool = False
    check_device: bool = False
    check_reachable: bool = False


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Rendezvous of all ranks.

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
        notes: Harmless log lines to expect.
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
    reason: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def master_addr(self) -> str:
        """Address of rank 0's store as rank 0 itself knows it."""
        return self.master_addrs[0]

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
            # Except on Linux, Gloo may see other names and addresses of interfaces than psutil.
            check_device=self.uses_gloo and (not self.on_linux or choice.name is None or choice.by_user),
            # Rank 0 has the store itself, and may not reach its own address from inside.
            check_reachable=not self.one_node and rank > 0,
        )


def bracketed(address: str) -> str:
    """Format a literal IP for use before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def plan_rendezvous(workers: Sequence[WorkerInfo], settings: Settings, backend: str) -> Rendezvous:
    """Plan the rendezvous of all ranks. O(number of workers).

    Args:
        workers: Every rank, in rank order, at least one; rank 0 holds a store open.
        settings: The user's settings.
        backend: The chosen backend.

    Raises:
        RendezvousError: No address of rank 0 can work for all ranks, or Gloo has no interface that can.
    """
    windows = workers[0].platform == "win32"
    one_node = is_one_node(workers)
    port = workers[0].network.store_port
    if port is None:
        raise RendezvousError("rank 0 holds no store open: none was created when the workers were probed.")
    addresses, origin, warnings = _addresses(workers, settings, one_node)
    uses_gloo = parse_backend(backend).connects_with_gloo
    interfaces: tuple[InterfaceChoice, ...] = ()
    gloo = ""
    if uses_gloo:
        interfaces, doubts = choose_interfaces(workers, one_node)
        warnings += doubts
        gloo = f", Gloo {_over(interfaces)}"
    warnings += _foreign_settings(workers)
    libuv = [worker.rank for worker in workers if worker.env.get("USE_LIBUV") == "1"]
    if windows and libuv:
        warnings += (f"USE_LIBUV=1 on {ranks_text(libuv)} is not kept: no torch for Windows has a libuv store",)
    host = bracketed(addresses[0])
    return Rendezvous(
        master_addrs=addresses,
        master_port=port,
        init_method=settings.init_method,
        one_node=one_node,
        uses_gloo=uses_gloo,
        interfaces=interfaces,
        libuv_off=windows,
        on_linux=workers[0].platform == "linux",
        reason=f"rank 0 at {host}:{port} ({origin}){gloo}{', libuv off' if windows else ''}",
        notes=(NOTE_10049,) if windows else (),
        warnings=warnings,
    )


def explain_unreachable(error: FracBackendError, workers: Sequence[WorkerInfo], master_addr: str) -> FracBackendError:
    """Add to the error of a rank that did not reach rank 0 where that address is from; the error itself where nothing is known of it.

    Args:
        error: The error of the start.
        workers: Every rank, in rank order.
        master_addr: The address that was tried.
    """
    first = workers[0]
    if not isinstance(error, UnreachableMasterError) or normal(master_addr) != normal(first.node_ip):
        return error
    own = owner_of(first, master_addr)
    found = f" Ray knows rank 0's node by {master_addr}{f' (interface {own})' if own else ''}"
    twins = [w.rank for w in workers if w.node_ip == first.node_ip and w.network.network_id != first.network.network_id]
    others = {
        name: [address for address in addresses if not is_loopback(address) and not is_link_local(address)]
        for name, addresses in first.network.interfaces.items()
        if name != own
    }
    listed = "; ".join(f"{name} {','.join(addresses)}" for name, addresses in list(others.items())[:6] if addresses)
    if not twins and not listed:
        return error
    if twins:
        found += f", and the other machine of {ranks_text(twins)} by the same, as of a bridge that each of them has"
    if listed:
        found += f"; the node also has {listed}"
    return UnreachableMasterError(
        f"{error}{found}. If the nodes reach each other by another address, start Ray on each with --node-ip-address.",
        ranks=error.ranks,
    )


def _foreign_settings(workers: Sequence[WorkerInfo]) -> tuple[str, ...]:
    """Warn of what is not of Ray Train: a variable of torchrun's, systems that Gloo does not connect with each other."""
    warnings = []
    agents = [worker.rank for worker in workers if worker.env.get(AGENT_STORE) == "True"]
    if agents:
        warnings.append(
            f"{AGENT_STORE}=True on {ranks_text(agents)} is not kept: torchrun sets it for its own workers, and every rank of a "
            "group that the train function makes would wait for a store that no agent holds"
        )
    macs = [worker.rank for worker in workers if worker.platform == "darwin"]
    if macs and len(macs) < len(workers):
        warnings.append(
            f"macOS on {ranks_text(macs)}, Linux on the others: Gloo between them is reported to hang (gloo#268); place all workers "
            "on nodes of one system"
        )
    return tuple(warnings)


def is_one_node(workers: Sequence[WorkerInfo]) -> bool:
    """Return True where all ranks share one loopback: one Ray node, or several on one machine with one address.

    The network's id alone is not enough: machines that were restored from one snapshot have equal boot ids and namespaces.
    """
    if len({worker.node_id for worker in workers}) == 1:
        return True
    networks = {worker.network.network_id for worker in workers}
    return len({worker.node_ip for worker in workers}) == 1 and len(networks) == 1 and "" not in networks


_Addresses = tuple[tuple[str, ...], str, tuple[str, ...]]


def _addresses(workers: Sequence[WorkerInfo], settings: Settings, one_node: bool) -> _Addresses:
    """Return rank 0's address as each rank reaches it, the source of it, and warnings."""
    if settings.master_addr is not None:
        return _configured(workers, settings.master_addr, one_node)
    if one_node:
        return (_loopback(workers[0]),) * len(workers), "one node", ()
    address, warnings = _node_address(workers)
    return (address,) * len(workers), "its node's address", warnings


def _configured(workers: Sequence[WorkerInfo], value: str, one_node: bool) -> _Addresses:
    lost = [worker for worker in workers if worker.network.master_addr_missing]
    if lost:
        where = ", ".join(worker.where for worker in lost[:4])
        raise RendezvousError(
            f"master_addr={value!r} cannot be resolved by {ranks_text([worker.rank for worker in lost])} ({where}: "
            f"{lost[0].network.master_addr_missing}). It must resolve to rank 0's node everywhere; use an IP address of it.",
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
            f"master_addr={value!r} is a loopback address for {ranks_text(away)} on other nodes; it is used as configured",
        )
    elif workers[0].network.interfaces and owner_of(workers[0], addresses[0]) is None:
        warnings = (
            f"master_addr={value!r} is on no interface of rank 0's node {workers[0].node_ip}; it is used as configured",
        )
    return addresses, "master_addr as configured", warnings


def _loopback(worker: WorkerInfo) -> str:
    known = worker.network.interfaces
    for address in ("127.0.0.1", "::1"):
        if not known or owner_of(worker, address) is not None:
            return address
    return worker.node_ip


def _node_address(workers: Sequence[WorkerInfo]) -> tuple[str, tuple[str, ...]]:
    """Return Ray's address of rank 0's node, if other nodes can use it, and warnings."""
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


def _loopback_text(loopback: Sequence[WorkerInfo]) -> str:
    where = ", ".join(f"rank {worker.rank} on node {worker.node_ip}" for worker in loopback[:4])
    found = f"Ray knows several nodes of this job, and some only by a loopback address ({where})"
    if loopback[0].platform in ("win32", "darwin"):
        return (
            f"{found}. Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1 for every Ray process on every node before `ray start`: "
            "without it Ray on Windows and macOS serves one machine."
        )
    return f"{found}. Start each Ray node with --node-ip-address of an interface that the others reach."


def _listed(worker: WorkerInfo) -> str:
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


def choose_interfaces(
    workers: Sequence[WorkerInfo], one_node: bool
) -> tuple[tuple[InterfaceChoice, ...], tuple[str, ...]]:
    """Choose Gloo's interface of every rank; also return warnings, one line each.

    Args:
        workers: Every rank, in rank order.
        one_node: All ranks share one loopback interface.

    Raises:
        RendezvousError: The ranks would use addresses of different families, or no interface can be used.
    """
    doubts: dict[str, list[int]] = defaultdict(list)
    choices = []
    for worker in workers:
        choice, found = _choose(worker, one_node)
        choices.append(choice)
        for doubt in found:
            doubts[doubt].append(worker.rank)
    lines = [f"{ranks_text(ranks)}: {doubt}" for doubt, ranks in doubts.items()]
    if not one_node:
        lines += _check_families(workers, choices)
    return tuple(choices), tuple(lines)


def owner_of(worker: WorkerInfo, address: str) -> str | None:
    """Return the name of the interface that has the address, None where none has."""
    wanted = normal(address)
    for name, addresses in worker.network.interfaces.items():
        if wanted in addresses:
            return name
    return None


def parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read a literal address without its scope; None for a name."""
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


def normal(address: str) -> str:
    """Normalize an address, without scope, so that two spellings of one compare equal."""
    bare = address.partition("%")[0]
    return str(parsed(bare) or bare) if ":" in bare else bare


def is_loopback(address: str) -> bool:
    """Return True for 127.0.0.0/8 and ::1, in any spelling."""
    found = parsed(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found or ipaddress.IPv4Address(0)).is_loopback


def is_link_local(address: str) -> bool:
    """Return True for fe80::/10 and 169.254.0.0/16, which are valid on one link only."""
    found = parsed(address)
    return found is not None and found.is_link_local


def _choose(worker: WorkerInfo, one_node: bool) -> tuple[InterfaceChoice, list[str]]:
    if one_node:
        ruled, doubts = _on_one_node(worker)
    else:
        ruled, doubts = _between_nodes(worker)
    set_by_user = worker.env.get(IFNAME)
    if not set_by_user:
        return ruled, doubts
    # On one node every interface reaches every rank.
    return InterfaceChoice(name=set_by_user, by_user=True), _conflicts(
        worker, set_by_user, None if one_node else ruled.name
    )


def _conflicts(worker: WorkerInfo, set_by_user: str, ruled: str | None) -> list[str]:
    known = worker.network.interfaces
    doubt = gloo_doubt(set_by_user, list(known)) if known else None
    if doubt is not None:
        return [f"{IFNAME}={set_by_user} is kept, but {doubt}"]
    if ruled is not None and ruled not in set_by_user.split(","):
        return [f"{IFNAME}={set_by_user} is kept; without it {ruled} would be used"]
    return []


def _on_one_node(worker: WorkerInfo) -> tuple[InterfaceChoice, list[str]]:
    """Choose the loopback interface, which needs no name server, no VPN and no link."""
    name = owner_of(worker, "127.0.0.1") or owner_of(worker, "::1")
    if worker.platform != "win32":
        if name is None:
            return InterfaceChoice(), []
        trouble = _trouble(worker, name)
        if trouble:
            return InterfaceChoice(), [_unset(name, trouble)]
        # Without a name Gloo takes the host name's address, or loopback where there is none: on one node either works.
        return InterfaceChoice(name=name, start_only=True), []
    if worker.network.default_device_missing is None:
        return InterfaceChoice(), []
    trouble = "there is no interface with a loopback address" if name is None else _trouble(worker, name)
    if trouble:
        raise BackendUnavailableError(
            f"Gloo finds no network device on node {worker.node_ip}: {worker.network.default_device_missing}, and "
            f"{trouble}. "
            f"Make the host name {worker.hostname!r} resolve to an address of the machine (a line in its hosts file), or "
            f"set {IFNAME} to an interface with a plain ASCII name.",
            ranks=(worker.rank,),
        )
    return InterfaceChoice(name=name), []


def _between_nodes(worker: WorkerInfo) -> tuple[InterfaceChoice, list[str]]:
    """Choose the interface that has the node's address."""
    name = owner_of(worker, worker.node_ip)
    if name is None:
        doubt = f"no interface has the node's address {worker.node_ip}: Gloo uses the one of the route to rank 0"
        return InterfaceChoice(by_route=True), [doubt]
    trouble = _trouble(worker, name)
    if trouble:
        return InterfaceChoice(), [_unset(name, trouble)]
    addresses = worker.network.interfaces[name]
    if worker.platform in _LINK_LOCAL_FIRST and any(is_link_local(address) for address in addresses):
        return InterfaceChoice(name=name), [
            f"Gloo takes the first address of {name}, which may be its link-local one; if the ranks cannot connect, "
            f"switch IPv6 off for that interface"
        ]
    return InterfaceChoice(name=name), []


def _trouble(worker: WorkerInfo, name: str) -> str | None:
    """Return why Gloo cannot use this name, None where it can."""
    if "," in name:
        return "its name has a comma, at which Gloo splits the list"
    if worker.platform == "win32" and not name.isascii():
        return "its name is not ASCII, and Windows passes variables to Gloo in another code page"
    addresses = worker.network.interfaces[name]
    if worker.platform in _LINK_LOCAL_FIRST and is_link_local(addresses[0]):
        return f"its first address {addresses[0]} is link-local, and Gloo takes the first"
    return None


def _unset(name: str, trouble: str) -> str:
    return f"{IFNAME} is not set to {name!r}: {trouble}. Gloo uses the address of the node's host name"


def _gloo_family(worker: WorkerInfo, choice: InterfaceChoice) -> str | None:
    """Return the IP version of the address that Gloo takes: an interface's IPv4 address where it has one."""
    addresses = worker.network.interfaces.get((choice.name or "").split(",")[0])
    if not addresses:
        return None
    return "IPv6" if all(":" in address for address in addresses) else "IPv4"


def _check_families(workers: Sequence[WorkerInfo], choices: Sequence[InterfaceChoice]) -> list[str]:
    """Refuse a mix of address families: Gloo cannot connect an IPv4 with an IPv6 address."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for worker, choice in zip(workers, choices, strict=True):
        family = _gloo_family(worker, choice)
        if family is not None:
            ranks_of[family].append(worker.rank)
    if len(ranks_of) < 2:
        return []
    shown = "; ".join(
        f"{ranks_text(ranks)} {family}, as node {workers[ranks[0]].node_ip} on {choices[ranks[0]].name}"
        for family, ranks in sorted(ranks_of.items())
    )
    found = f"Gloo cannot connect IPv4 with IPv6 addresses ({shown})"
    if any(choice.by_user for choice in choices):
        return [f"{found}; {IFNAME} is kept as set by the user"]
    fewer = min(ranks_of.values(), key=len)
    raise RendezvousError(
        f"{found}. Give all nodes addresses of one family and start Ray there with --node-ip-address, or set {IFNAME} to "
        "interfaces that have them.",
        ranks=fewer,
    )
