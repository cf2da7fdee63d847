"""Which network interface Gloo uses on every rank. Pure; driver or controller.

Without a name Gloo takes whatever address the node's own host name resolves to, which on many machines is a loopback or
foreign address. With one it takes the first address of that interface. MASTER_ADDR plays no part in it.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ray_fracbackend.errors import BackendUnavailableError, RendezvousError
from ray_fracbackend.facts import WorkerFacts, ranks_text

IFNAME = "GLOO_SOCKET_IFNAME"
# Systems whose list of addresses may start with a link-local one; Linux lists IPv4, then the widest scope of IPv6 first.
_LINK_LOCAL_FIRST = ("win32", "darwin")


@dataclass(frozen=True, kw_only=True)
class InterfaceChoice:
    """Gloo's interface on one rank.

    Attributes:
        name: Its name, None where Gloo is left to find one.
        by_user: The name is the user's own setting.
        by_route: The worker finds the name itself: that of its route to rank 0.
        start_only: Groups that the train function makes later work without the name, so that it is not left behind.
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


def choose_interfaces(
    workers: Sequence[WorkerFacts], one_node: bool, master_addrs: Sequence[str]
) -> tuple[tuple[InterfaceChoice, ...], tuple[str, ...]]:
    """Gloo's interface of every rank, and doubts, one line each.

    Args:
        workers: Facts of every rank, in rank order.
        one_node: All ranks share one loopback interface.
        master_addrs: Address of rank 0's store as each rank reaches it.

    Raises:
        RendezvousError: The ranks would use addresses of different families, or no interface can be used.
    """
    doubts: dict[str, list[int]] = defaultdict(list)
    choices = []
    for worker, master_addr in zip(workers, master_addrs, strict=True):
        choice, found = _choose(worker, one_node, master_addr)
        choices.append(choice)
        for doubt in found:
            doubts[doubt].append(worker.rank)
    lines = [f"{ranks_text(ranks)}: {doubt}" for doubt, ranks in doubts.items()]
    if not one_node:
        lines += _check_families(workers, choices)
    return tuple(choices), tuple(lines)


def owner_of(worker: WorkerFacts, address: str) -> str | None:
    """Name of the interface that has the address, None where none has."""
    wanted = normal(address)
    for name, addresses in worker.network.interfaces.items():
        if wanted in addresses:
            return name
    return None


def normal(address: str) -> str:
    """The shortest spelling of an address, without scope, so that two spellings of one compare equal."""
    bare = address.partition("%")[0]
    try:
        return str(ipaddress.ip_address(bare)) if ":" in bare else bare
    except ValueError:
        return bare


def is_loopback(address: str) -> bool:
    """True for 127.0.0.0/8 and ::1, in any spelling."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_link_local(address: str) -> bool:
    """True for fe80::/10 and 169.254.0.0/16, which mean something else on every link."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_link_local
    except ValueError:
        return False


def _choose(worker: WorkerFacts, one_node: bool, master_addr: str) -> tuple[InterfaceChoice, list[str]]:
    if one_node:
        ruled, doubts = _on_one_node(worker, master_addr)
    else:
        ruled, doubts = _between_nodes(worker)
    set_by_user = worker.env.get(IFNAME)
    if not set_by_user:
        return ruled, doubts
    # On one node every interface reaches every rank.
    return InterfaceChoice(name=set_by_user, by_user=True), _conflicts(
        worker, set_by_user, None if one_node else ruled.name
    )


def _conflicts(worker: WorkerFacts, set_by_user: str, ruled: str | None) -> list[str]:
    known = worker.network.interfaces
    missing = [name for name in set_by_user.split(",") if name not in known]
    if known and missing:
        return [
            f"{IFNAME}={set_by_user} is kept, but {missing[0]!r} is none of this node's interfaces ({', '.join(known)})"
        ]
    if ruled is not None and ruled not in set_by_user.split(","):
        return [f"{IFNAME}={set_by_user} is kept; without it {ruled} would be used"]
    return []


def _on_one_node(worker: WorkerFacts, master_addr: str) -> tuple[InterfaceChoice, list[str]]:
    """Rows 1, 3 and 7: the loopback interface, which needs no name server, no VPN and no link."""
    name = owner_of(worker, "127.0.0.1") or owner_of(worker, "::1")
    if worker.platform != "win32":
        if name is None:
            return InterfaceChoice(), []
        trouble = _trouble(worker, name)
        if trouble:
            return InterfaceChoice(), [_unset(name, trouble)]
        # Without a name Gloo takes the host name's address, or loopback where there is none: on one node either will do.
        return InterfaceChoice(name=name, start_only=not worker.network.name_server_silent), []
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


def _between_nodes(worker: WorkerFacts) -> tuple[InterfaceChoice, list[str]]:
    """Rows 2, 4 to 6 and 8: the interface that owns the node's address."""
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


def _trouble(worker: WorkerFacts, name: str) -> str | None:
    """Why Gloo cannot be given this name, None where it can."""
    if "," in name:
        return "its name has a comma, at which Gloo splits the list"
    if worker.platform == "win32" and not name.isascii():
        return "its name is not ASCII, and Windows hands variables to Gloo in another code page"
    addresses = worker.network.interfaces[name]
    if worker.platform in _LINK_LOCAL_FIRST and is_link_local(addresses[0]):
        return f"its first address {addresses[0]} is link-local, and Gloo takes the first"
    return None


def _unset(name: str, trouble: str) -> str:
    return f"{IFNAME} is not set to {name!r}: {trouble}. Gloo uses the address of the node's host name"


def _gloo_family(worker: WorkerFacts, choice: InterfaceChoice) -> str | None:
    """IP version of the address that Gloo takes: an interface's IPv4 address where it has one."""
    addresses = worker.network.interfaces.get((choice.name or "").split(",")[0])
    if not addresses:
        return None
    return "IPv6" if all(":" in address for address in addresses) else "IPv4"


def _check_families(workers: Sequence[WorkerFacts], choices: Sequence[InterfaceChoice]) -> list[str]:
    """Row 5: Gloo cannot connect an IPv4 with an IPv6 address."""
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
