"""Extension of griffe for mkdocs.yml: what griffe cannot read from the source. Called by MkDocs."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# Code after a double colon, as in reStructuredText.
_CODE = re.compile(r"::\n\n((?: {4,}.*(?:\n|$)|\n)+)")


class PublicApi(griffe.Extension):
    """Show code in docstrings as Python."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert code in a docstring to a fenced block."""
        if obj.docstring:
            obj.docstring.value = _CODE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    return f":\n\n```python\n{textwrap.dedent(found[1]).strip()}\n```\n\n"
