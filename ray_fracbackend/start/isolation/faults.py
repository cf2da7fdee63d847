"""Find the rank, device or link at fault from the tests of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ray_fracbackend.decide.worker_info import WorkerAddress, named

# With up to this many nodes each one tests its links to all others, with more only those at distances of powers of two.
MAX_MESH = 64


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of one rank's tests.

    Attributes:
        device_fault: How the rank's device failed in a test without other ranks; empty if it did not.
        links: Whether data arrived over a new connection, by rank on another node.
    """

    device_fault: str = ""
    links: Mapping[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """One fault: the ranks at fault, or on both ends of a link, and a description with ranks and nodes."""

    ranks: tuple[int, ...]
    text: str


def link_targets(addresses: Sequence[WorkerAddress]) -> list[list[int]]:
    """Return for each rank the ranks to which it tests a link: one on each other node."""
    nodes = list(_ranks_by_node(addresses).values())
    steps = set(range(1, len(nodes)))
    if len(nodes) > MAX_MESH:
        steps = {sign * 2**power % len(nodes) for power in range(len(nodes).bit_length() - 1) for sign in (1, -1)}
    peers: list[list[int]] = [[] for _ in addresses]
    for node, ranks in enumerate(nodes):
        for place, rank in enumerate(ranks):
            others = (nodes[(node + step) % len(nodes)] for step in steps)
            peers[rank] = [other[place % len(other)] for other in others]
    return peers


def diagnose(
    findings: Mapping[int, Findings], silent: Collection[int], addresses: Sequence[WorkerAddress]
) -> list[Fault]:
    """Return the faults: silent ranks, then failing devices, then links.

    Args:
        findings: Findings by rank, of the ranks that ran the tests; their links are to other such ranks.
        silent: Ranks that did not answer.
        addresses: Node and process of each rank.
    """
    return [*_silent(silent, addresses), *_devices(findings, addresses), *_links(findings, addresses)]


def _silent(silent: Collection[int], addresses: Sequence[WorkerAddress]) -> Iterator[Fault]:
    if silent:
        ranks = tuple(sorted(silent))
        text = f"no answer from {named(ranks, addresses)}: the process is stopped, or it or its device hangs"
        yield Fault(ranks, text)


def _devices(findings: Mapping[int, Findings], addresses: Sequence[WorkerAddress]) -> Iterator[Fault]:
    for rank, finding in sorted(findings.items()):
        if finding.device_fault:
            text = f"the device of {addresses[rank].text} fails in a test without other ranks ({finding.device_fault})"
            yield Fault((rank,), text)


def _links(findings: Mapping[int, Findings], addresses: Sequence[WorkerAddress]) -> Iterator[Fault]:
    nodes, node_of = _ranks_by_node(addresses), {address.rank: address.node_id for address in addresses}
    tested: dict[str, set[str]] = {node: set() for node in nodes}
    unreached: dict[str, set[str]] = {node: set() for node in nodes}
    for rank, finding in findings.items():
        for peer, is_reached in finding.links.items():
            node, other = node_of[rank], node_of[peer]
            tested[node].add(other)
            tested[other].add(node)
            if not is_reached:
                unreached[node].add(other)
    broken = {node: unreached[node] | {other for other in nodes if node in unreached[other]} for node in nodes}
    isolated = [node for node in nodes if len(tested[node]) > 1 and broken[node] == tested[node]]
    if isolated:
        ranks = tuple(sorted(rank for node in isolated for rank in nodes[node]))
        yield Fault(ranks, f"no connections between other nodes and {named(ranks, addresses)}")
    for node, other in combinations([node for node in nodes if node not in isolated], 2):
        if other in broken[node]:
            ends = [named(nodes[end], addresses) for end in (node, other)]
            if other not in unreached[node]:
                ends.reverse()
            is_one_way = (other in unreached[node]) != (node in unreached[other])
            template = "no connections from {} to {}" if is_one_way else "no connections between {} and {}"
            yield Fault((*nodes[node], *nodes[other]), template.format(*ends))


def _ranks_by_node(addresses: Sequence[WorkerAddress]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for address in addresses:
        nodes.setdefault(address.node_id, []).append(address.rank)
    return nodes
