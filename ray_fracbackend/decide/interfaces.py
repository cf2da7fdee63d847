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

from collections.abc import Sequence

from ray_fracbackend.decide.addresses import owner_of
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text

IFNAME = "GLOO_SOCKET_IFNAME"
# In place of a name: the worker finds the interface of its route to rank 0.
BY_ROUTE = "the interface of the route to rank 0"


def choose_interfaces(workers: Sequence[WorkerInfo], one_node: bool) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Choose Gloo's interface of every rank, None where Gloo finds one itself; also return warnings, one line each.

    Args:
        workers: Every rank, in rank order.
        one_node: Whether all ranks share one loopback interface.
    """
    interfaces: list[str | None] = []
    ranks_of: dict[str, list[int]] = {}
    for worker in workers:
        interface, doubt = (_on_one_node(worker), None) if one_node else _between_nodes(worker)
        if own := worker.env.get(IFNAME):
            # On one node every interface reaches every rank.
            interface, doubt = own, _conflict(worker, own, None if one_node else interface)
        interfaces.append(interface)
        if doubt is not None:
            ranks_of.setdefault(doubt, []).append(worker.rank)
    return tuple(interfaces), tuple(f"{ranks_text(ranks)}: {doubt}" for doubt, ranks in ranks_of.items())


def interfaces_text(workers: Sequence[WorkerInfo], interfaces: Sequence[str | None]) -> str:
    """Format the interfaces of all ranks for the log: ``over eth0``, or ``over eth0 (rank 0), over ens5 (rank 1)``.

    Args:
        workers: Every rank, in rank order.
        interfaces: Gloo's interface of every rank, by rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for worker, interface in zip(workers, interfaces, strict=True):
        by_user = " as set by the user" if worker.env.get(IFNAME) else ""
        text = f"over {interface or 'the address of the host name'}{by_user}"
        ranks_of.setdefault(text, []).append(worker.rank)
    if len(ranks_of) == 1:
        return next(iter(ranks_of))
    shown = [f"{text} ({ranks_text(ranks)})" for text, ranks in list(ranks_of.items())[:4]]
    return ", ".join(shown) + (", ..." if len(ranks_of) > 4 else "")


def _on_one_node(worker: WorkerInfo) -> str | None:
    """Return the loopback interface, which needs no name server, no VPN and no link."""
    if worker.platform == "win32" and worker.network.default_device_missing is None:
        return None
    return owner_of(worker.network.interfaces, "127.0.0.1") or owner_of(worker.network.interfaces, "::1")


def _between_nodes(worker: WorkerInfo) -> tuple[str, str | None]:
    """Return the interface that has the node's address, and a doubt about it."""
    if name := owner_of(worker.network.interfaces, worker.node_ip):
        return name, None
    return BY_ROUTE, f"no interface has the node's address {worker.node_ip}: Gloo uses {BY_ROUTE}"


def _conflict(worker: WorkerInfo, own: str, ruled: str | None) -> str | None:
    known = list(worker.network.interfaces)
    if known and (doubt := gloo_doubt(own, known)) is not None:
        return f"{IFNAME}={own} is kept, but {doubt}"
    if ruled in known and ruled not in own.split(","):
        return f"{IFNAME}={own} is kept; without it {ruled} would be used"
    return None


def gloo_doubt(value: str, known: Sequence[str]) -> str | None:
    """Return which of the names in ``GLOO_SOCKET_IFNAME`` is not an interface, in one clause; None if all are.

    Args:
        value: Value of the variable.
        known: Names of the node's interfaces.
    """
    missing = next((name for name in value.split(",") if name not in known), None)
    return None if missing is None else f"{missing!r} is none of this node's interfaces ({', '.join(known)})"
