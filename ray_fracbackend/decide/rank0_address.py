"""Choose the address of rank 0's store for each rank, always a literal IP.

========================  ==============================================================================
``master_addr`` is set    as configured; a host name is replaced by the address that it resolves to on each rank
all ranks on one node     loopback
otherwise                 Ray's address of rank 0's node; an error if other nodes cannot use it
========================  ==============================================================================

c10d always receives an IP address, because it would look up a host name repeatedly.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray_fracbackend.decide.addresses import is_link_local, is_loopback, owner_of
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text
from ray_fracbackend.errors import RendezvousError

# Addresses of rank 0's store by rank, their source for the log, and warnings.
_Addresses = tuple[tuple[str, ...], str, tuple[str, ...]]


def rank0_addresses(workers: Sequence[WorkerInfo], settings: Settings, one_node: bool) -> _Addresses:
    """Return rank 0's address for each rank, its source, and warnings, one line each.

    Args:
        workers: Every rank, in rank order.
        settings: The user's settings.
        one_node: Whether all ranks share one loopback interface.

    Raises:
        RendezvousError: No address of rank 0 works for all ranks.
    """
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
            f"master_addr={value!r} is a loopback address for {ranks_text(away)} on other nodes, and is used as configured",
        )
    elif workers[0].network.interfaces and owner_of(workers[0].network.interfaces, addresses[0]) is None:
        warnings = (
            f"master_addr={value!r} is on no interface of rank 0's node {workers[0].node_ip} ({_listed(workers[0])}), and is used as "
            "configured",
        )
    return addresses, "master_addr as configured", warnings


def _loopback(worker: WorkerInfo) -> str:
    known = worker.network.interfaces
    for address in ("127.0.0.1", "::1"):
        if not known or owner_of(known, address) is not None:
            return address
    return worker.node_ip


def _node_address(workers: Sequence[WorkerInfo]) -> tuple[str, tuple[str, ...]]:
    """Return Ray's address of rank 0's node, if other nodes can use it, and warnings."""
    first = workers[0]
    interfaces = first.network.interfaces
    loopback = [worker for worker in workers if is_loopback(worker.node_ip)]
    if loopback:
        raise RendezvousError(_loopback_text(loopback), ranks=[worker.rank for worker in loopback])
    address = first.node_ip
    if is_link_local(address):  # it needs a scope, which differs between nodes
        name = owner_of(interfaces, address)
        others = [a for a in interfaces.get(name or "", ()) if not is_link_local(a)]
        if not others:
            raise RendezvousError(
                f"rank 0's node address {address} is link-local and its interface has no other. Other nodes cannot use "
                "it; start that Ray node with --node-ip-address, or set FracTorchConfig(master_addr=...).",
                ranks=(first.rank,),
            )
        address = others[0]
    if not interfaces or owner_of(interfaces, address) is not None:
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
