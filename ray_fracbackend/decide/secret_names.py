"""Find names of environment variables that may contain a secret, so that no report shows them."""

from __future__ import annotations

_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "_KEY")


def may_be_secret(name: str) -> bool:
    """Return whether a variable with this name may contain a secret."""
    return any(word in name.upper() for word in _WORDS)
