"""Extension of griffe for mkdocs.yml: what griffe cannot read from the source. Called by MkDocs."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# Code after a double colon, as in reStructuredText.
_CODE = re.compile(r"::\n\n((?: {4,}.*(?:\n|$)|\n)+)")


class PublicApi(griffe.Extension):
    """Show the settings with their defaults, and code in docstrings as Python."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Treat ``_setting(default, rule, help)`` of Settings as the dataclass field that it creates."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) != "_setting":
            return
        default, *rest = call.arguments
        given = {each.name: each.value for each in rest if isinstance(each, griffe.ExprKeyword)}
        arguments = {"default": default, "kw_only": given.get("kw_only", "True")}
        attr.value = griffe.ExprCall(
            griffe.ExprName("field", parent=attr.module),
            [griffe.ExprKeyword(name, value) for name, value in arguments.items()],
        )

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert code in a docstring to a fenced block."""
        if obj.docstring:
            obj.docstring.value = _CODE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    return f":\n\n```python\n{textwrap.dedent(found[1]).strip()}\n```\n\n"
