"""Find the known name that a misspelled one stands for. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a misspelled one, None if no name is similar.

    Args:
        name: The misspelled name, in upper or lower case; a value that is no string is similar to no name.
        known: The correct names.
    """
    by_lower_case = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), by_lower_case, n=1) if isinstance(name, str) else []
    return by_lower_case[close[0]] if close else None
