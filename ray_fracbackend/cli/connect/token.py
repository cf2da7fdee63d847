"""The token of a Ray cluster that requires one: its source in this process, and the message if it is refused.

The rules are those of Ray's own client (Ray 2.40 to 2.60). Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path

SETTINGS = "RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"


def token() -> str | None:
    """Return the token that Ray uses, None if there is none."""
    if found := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return found
    try:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        return path.read_text().strip() or None
    except (OSError, UnicodeError, RuntimeError):  # RuntimeError: no home folder
        return None


def refusal(automatic: bool) -> str:
    """Return why a cluster refuses this process, as the end of a sentence about the cluster; contains the fix, not the token.

    Args:
        automatic: The address comes from this machine, not from the user: Ray then sends a token by default.
    """
    fix = f"with the cluster's token in {SETTINGS} (`ray get-auth-token` prints it on the head node)"
    mode, found = os.environ.get("RAY_AUTH_MODE"), token()
    sends = mode.lower() == "token" if mode is not None else automatic and found is not None
    if not sends:
        why = f"with RAY_AUTH_MODE={mode}" if mode else "to this address while RAY_AUTH_MODE is not set"
        return f"requires a token, and Ray sends none {why}; set RAY_AUTH_MODE=token, {fix}"
    if found is None:
        return f"requires a token, and this process has none; try again {fix}"
    return f"refuses the token of {_source()}; try again {fix}"


def _source() -> str:
    if os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return f"RAY_AUTH_TOKEN_PATH={path}" if path else "~/.ray/auth_token"
