"""Choose Gloo's network interface for every rank from the workers' reports.

Example: two nodes whose interfaces have different names, as in the log line::

    over eth0 (rank 0), over ens5 (rank 1)

Without an interface name Gloo uses the address to which the node's own host name resolves. On many machines this is a
loopback address or one of another machine. With an interface name Gloo uses the first address of that interface.
MASTER_ADDR does not affect it. On one node every rank therefore uses the loopback interface. Between nodes each rank uses
the interface with its node's address. A name that the user set is kept; if it conflicts with these rules, there is a
warning. docs/windows.md describes the rules of each system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
            ruled, interface, doubt = interface, own, None
            # On one node every interface reaches every rank.
            if not one_node and ruled in worker.network.interfaces and ruled not in own.split(","):
                doubt = f"{IFNAME}={own} is kept; without it {ruled} would be used"
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
    return loopback_of(worker.network.interfaces) if worker.network.loopback_works else None


def loopback_of(interfaces: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the name of the loopback interface, None if there is none."""
    return owner_of(interfaces, "127.0.0.1") or owner_of(interfaces, "::1")


def _between_nodes(worker: WorkerInfo) -> tuple[str, str | None]:
    """Return the interface that has the node's address, and a doubt about it."""
    if name := owner_of(worker.network.interfaces, worker.node_ip):
        return name, None
    return BY_ROUTE, f"no interface has the node's address {worker.node_ip}: Gloo uses {BY_ROUTE}"
