"""What may be shown of texts and variables that come from elsewhere: in messages, logs, reports and on a terminal. Standard library only."""

from __future__ import annotations

import re

# Except tab and line feed.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
_USER = re.compile(r"(?<=://)[^/\s\"'@]+(?=@)")
_SECRET = re.compile(
    r"TOKEN|SECRET|PASS|PWD|CRED|PRIVATE|COOKIE|(?<!_P)KEY|_(AUTH|SAS|DSN|CONNECTION_STRING)$", re.IGNORECASE
)


def printable(text: str) -> str:
    """Return a text without control characters, which a terminal executes, and without user and password of an address."""
    return _USER.sub("***", text.translate(_CONTROLS))


def may_be_secret(name: str) -> bool:
    """Return whether a variable with this name may contain a secret."""
    return _SECRET.search(name) is not None
