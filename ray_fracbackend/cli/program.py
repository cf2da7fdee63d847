"""Name of the program, and result and error of its commands. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROGRAM = "ray-fracbackend"


class CommandError(Exception):
    """Error of a command, shown as one line or one document.

    Args:
        reason: Stable, machine-readable name.
        message: One line with value, rule and fix.
        ranks: Ranks at fault, if any.
        code: The exit code.
    """

    def __init__(self, reason: str, message: str, *, ranks: Sequence[int] = (), code: int = 1) -> None:
        super().__init__(message)
        self.reason, self.ranks, self.code = reason, list(ranks), code


def wrong_usage(error: object) -> CommandError:
    """Return the error for a wrong command line."""
    return CommandError("wrong_usage", str(error), code=2)


@dataclass(frozen=True)
class Outcome:
    """Result of a command.

    Attributes:
        text: Text for people.
        values: Plain values for ``json.dumps``.
        error: The problem, None if there is none.
    """

    text: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    error: CommandError | None = None

    def document(self) -> dict[str, Any]:
        """Return what ``--json`` prints: ``ok`` and ``error`` first, for every command and failure."""
        error = self.error
        shown = error and {"reason": error.reason, "message": str(error), "ranks": error.ranks}
        return {"ok": error is None, "error": shown, **self.values}
