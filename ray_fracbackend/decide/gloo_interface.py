"""Choose Gloo's network interface for every rank from the workers' reports.

Example: two nodes whose interfaces have different names, as in the log line::

    over eth0 (rank 0), over ens5 (rank 1)

Without an interface name Gloo uses the address to which the node's own host name resolves. On many machines this is a
loopback address or one of another machine. With an interface name Gloo uses the first address of that interface.
MASTER_ADDR does not affect it. On one node every rank therefore uses the loopback interface; on Windows only if the
host name leads to no device. Between nodes each rank uses the interface with its node's address. A name that the user
set is kept; if it conflicts with these rules, there is a warning. docs/windows.md describes the rules of each system.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ray_fracbackend.decide.addresses import is_link_local, owner_of
from ray_fracbackend.decide.interfaces import IFNAME, gloo_doubt
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text
from ray_fracbackend.errors import BackendUnavailableError, RendezvousError

# On these systems the list of addresses may start with a link-local address. Linux lists IPv4 first, then the widest
# scope of IPv6.
_LINK_LOCAL_FIRST = ("win32", "darwin")


@dataclass(frozen=True, kw_only=True)
class InterfaceChoice:
    """Gloo's interface on one rank.

    Attributes:
        name: Name of the interface, None if Gloo finds one itself.
        by_user: Whether the user set the name.
        by_route: Whether the worker finds the name itself, from its route to rank 0.
        start_only: Whether the name is removed after the start: later groups of the train function work without it.
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
    workers: Sequence[WorkerInfo], one_node: bool
) -> tuple[tuple[InterfaceChoice, ...], tuple[str, ...]]:
    """Choose Gloo's interface of every rank; also return warnings, one line each.

    Args:
        workers: Every rank, in rank order.
        one_node: Whether all ranks share one loopback interface.

    Raises:
        RendezvousError: The ranks would use addresses of different families.
        BackendUnavailableError: Gloo finds no network device on a Windows node.
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


def interfaces_text(interfaces: Sequence[InterfaceChoice]) -> str:
    """Format the interfaces of all ranks for the log: ``over eth0``, or ``over eth0 (rank 0), over ens5 (rank 1)``.

    Args:
        interfaces: Gloo's interface of every rank, by rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, choice in enumerate(interfaces):
        ranks_of.setdefault(choice.text, []).append(rank)
    if len(ranks_of) == 1:
        return next(iter(ranks_of))
    shown = [f"{text} ({ranks_text(ranks)})" for text, ranks in list(ranks_of.items())[:4]]
    return ", ".join(shown) + (", ..." if len(ranks_of) > 4 else "")


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
    known = worker.network.interfaces
    name = owner_of(known, "127.0.0.1") or owner_of(known, "::1")
    if worker.platform != "win32":
        if name is None:
            return InterfaceChoice(), []
        trouble = _trouble(worker, name)
        if trouble:
            return InterfaceChoice(), [_unset(name, trouble)]
        # Without a name Gloo uses the host name's address, or loopback if there is none. On one node both work.
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
    name = owner_of(worker.network.interfaces, worker.node_ip)
    if name is None:
        doubt = f"no interface has the node's address {worker.node_ip}: Gloo uses the one of the route to rank 0"
        return InterfaceChoice(by_route=True), [doubt]
    trouble = _trouble(worker, name)
    if trouble:
        return InterfaceChoice(), [_unset(name, trouble)]
    addresses = worker.network.interfaces[name]
    if worker.platform in _LINK_LOCAL_FIRST and any(is_link_local(address) for address in addresses):
        return InterfaceChoice(name=name), [
            f"Gloo uses the first address of {name}, which may be its link-local one; if the ranks cannot connect, "
            f"switch IPv6 off for that interface"
        ]
    return InterfaceChoice(name=name), []


def _trouble(worker: WorkerInfo, name: str) -> str | None:
    """Return why Gloo cannot use this name, None if it can."""
    if "," in name:
        return "its name has a comma, at which Gloo splits the list"
    if worker.platform == "win32" and not name.isascii():
        return "its name is not ASCII, and Windows passes variables to Gloo in another code page"
    addresses = worker.network.interfaces[name]
    if worker.platform in _LINK_LOCAL_FIRST and is_link_local(addresses[0]):
        return f"its first address {addresses[0]} is link-local, and Gloo uses the first"
    return None


def _unset(name: str, trouble: str) -> str:
    return f"{IFNAME} is not set to {name!r}: {trouble}. Gloo uses the address of the node's host name"


def _gloo_family(worker: WorkerInfo, choice: InterfaceChoice) -> str | None:
    """Return the IP version of the address that Gloo uses: an interface's IPv4 address if it has one."""
    addresses = worker.network.interfaces.get((choice.name or "").split(",")[0])
    if not addresses:
        return None
    return "IPv6" if all(":" in address for address in addresses) else "IPv4"


def _check_families(workers: Sequence[WorkerInfo], choices: Sequence[InterfaceChoice]) -> list[str]:
    """Refuse mixed address families: Gloo cannot connect an IPv4 address with an IPv6 address."""
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
