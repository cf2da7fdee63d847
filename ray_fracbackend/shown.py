"""What may be shown of texts and variables that come from elsewhere: in messages, logs, reports and on a terminal. Standard library only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Except tab and line feed.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
_USER = re.compile(r"(?<=://)[^/\s]+(?=@)")
_SECRET = re.compile(
    r"TOKEN|SECRET|PASS|PWD|CRED|PRIVATE|COOKIE|AUTH|(?<!_P)KEY|_(SAS|DSN|CONNECTION_STRING)$", re.IGNORECASE
)


def printable(value: Any) -> Any:
    """Return a text without control characters, which a terminal executes, and without user and password of an address.

    Args:
        value: A text, or plain values for ``json.dumps`` with texts.
    """
    if isinstance(value, str):
        return _USER.sub("***", value.translate(_CONTROLS))
    if isinstance(value, Mapping):
        return {printable(key): printable(each) for key, each in value.items()}
    return [printable(each) for each in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def decoded() -> Iterator[None]:
    """Raise torch's errors in the block whose text is not UTF-8 as a RuntimeError: Windows' own texts are in the ANSI code page."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RuntimeError(error.object.decode("mbcs" if os.name == "nt" else "utf-8", "replace")) from None


def may_be_secret(name: str) -> bool:
    """Return whether a variable with this name may contain a secret."""
    return _SECRET.search(name) is not None
