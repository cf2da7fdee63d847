"""Find the known name that a misspelled one stands for. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `` (did you mean 'gloo'?)`` for a misspelled value, an empty string if no known one is similar."""
    close = get_close_matches(name.lower(), known, n=1) if isinstance(name, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""
