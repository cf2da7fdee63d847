"""Lines about machines as frozen dataclasses, and their text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        name: Subject; stable, for programs.
        level: ``ok``, ``warning`` (training works, but not as well as it could) or ``problem``.
        text: Result of the check, the same on equal nodes.
        fix: What to do, empty if nothing.
        detail: Values of this node alone, such as its addresses.
    """

    name: str
    level: str
    text: str
    fix: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Node:
    """Result of one machine.

    Attributes:
        name: Its name.
        checks: The lines about it.
        environment: Versions, GPUs and variables, for an issue.
    """

    name: str
    checks: tuple[Check, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def report(nodes: Sequence[Node]) -> str:
    """Format a block of lines for equal nodes, with a fix under each line that needs one, a block for an issue, and the verdict."""
    lines: list[str] = []
    issue: list[str] = []
    for first, *others in _equal(nodes):
        names = ", ".join(node.name for node in (first, *others))
        lines.append(f"{len(others) + 1} equal nodes, with the values of the first: {names}" if others else names)
        for check in first.checks:
            lines.append(
                f"  {check.level:<8} {check.name:<13} {check.text}{f' ({check.detail})' if check.detail else ''}"
            )
            if check.fix:
                lines.append(f"{'':25}fix: {check.fix}")
        # Indented, which Markdown shows as code.
        issue += ["", *(f"    {name}: {' '.join(value.split())}" for name, value in first.environment.items())]
    return "\n".join([*lines, "", "Paste this into an issue:", *issue, "", verdict(nodes)])


def verdict(nodes: Sequence[Node]) -> str:
    """Return how many problems and warnings there are, and their subjects; a line about equal nodes counts once."""
    counts = []
    for level in ("problem", "warning"):
        names = [check.name for first, *_ in _equal(nodes) for check in first.checks if check.level == level]
        listed = f" ({', '.join(dict.fromkeys(names))})" if names else ""
        counts.append(f"{len(names)} {level}{'' if len(names) == 1 else 's'}{listed}")
    return ", ".join(counts)


def _equal(nodes: Sequence[Node]) -> list[list[Node]]:
    """Group nodes with equal lines."""
    groups: dict[tuple[Check, ...], list[Node]] = {}
    for node in nodes:
        groups.setdefault(tuple(replace(check, detail="") for check in node.checks), []).append(node)
    return list(groups.values())
