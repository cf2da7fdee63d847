"""Group the lines about the nodes of a cluster: one block for equal nodes, one line for a warning of several nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_fracbackend.cli.doctor.report import Check

# Equal on equal nodes: name, level, text and fix without a node's own values.
Kind = tuple[str, str, str, str]


@dataclass(frozen=True)
class Block:
    """Lines about nodes.

    Attributes:
        nodes: Names of the nodes. Several nodes have equal lines; those of the first are shown. Empty if each line names its nodes.
        lines: Each with its nodes; empty if these are the nodes of the block.
    """

    nodes: tuple[str, ...]
    lines: tuple[tuple[Check, tuple[str, ...]], ...]


def kind_of(check: Check, own_values: Mapping[str, str]) -> Kind:
    """Return a line without the values of its node.

    Args:
        check: The line.
        own_values: Patterns of values that differ from node to node, and their placeholders.
    """
    text, fix = check.text, check.fix
    for pattern, word in own_values.items():
        text, fix = re.sub(pattern, word, text), re.sub(pattern, word, fix)
    return check.name, check.level, text, fix


def blocks(nodes: Mapping[str, Sequence[Check]], own_values: Mapping[str, Mapping[str, str]]) -> list[Block]:
    """Group the lines of a cluster's nodes.

    Args:
        nodes: Lines by the name of their node.
        own_values: As for `kind_of`, by the name of the node.
    """
    kinds = {
        name: {kind_of(check, own_values.get(name, {})): check for check in checks} for name, checks in nodes.items()
    }
    several = _in_several(_equal(kinds).values(), kinds)
    shared: dict[Kind, tuple[Check, list[str]]] = {}
    for name, found in kinds.items():
        for kind in (kind for kind in found if kind in several):
            shared.setdefault(kind, (found[kind], []))[1].append(name)
    left = {name: {kind: found[kind] for kind in found if kind not in several} for name, found in kinds.items()}
    grouped = [
        Block(tuple(names), tuple((check, ()) for check in left[names[0]].values())) for names in _equal(left).values()
    ]
    if shared:
        grouped.append(Block((), tuple((check, tuple(names)) for check, names in shared.values())))
    return grouped


def _equal(kinds: Mapping[str, Mapping[Kind, Check]]) -> dict[tuple[Kind, ...], list[str]]:
    """Return the names of nodes, grouped by their lines."""
    groups: dict[tuple[Kind, ...], list[str]] = {}
    for name, found in kinds.items():
        groups.setdefault(tuple(found), []).append(name)
    return groups


def _in_several(groups: Iterable[Sequence[str]], kinds: Mapping[str, Mapping[Kind, Check]]) -> set[Kind]:
    """Return warnings and problems that several groups of nodes have."""
    seen: set[Kind] = set()
    several: set[Kind] = set()
    for names in groups:
        found = {kind for kind in kinds[names[0]] if kind[1] != "ok"}
        several |= found & seen
        seen |= found
    return several
