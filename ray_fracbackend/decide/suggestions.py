"""Find the known name that a misspelled one stands for. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a misspelled one, None if no name is similar.

    Args:
        name: The misspelled name; a value that is no string is similar to no name.
        known: The correct names.
    """
    close = get_close_matches(name.lower(), known, n=1) if isinstance(name, str) else []
    return close[0] if close else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `` (did you mean 'gloo'?)`` for a misspelled value, an empty string if no known one is similar."""
    meant = nearest(name, known)
    return f" (did you mean {meant!r}?)" if meant else ""
