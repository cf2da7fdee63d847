"""The reading path of docs/development/architecture.md stays short."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_it_is_short() -> None:
    """The path has at most 12 modules and 2,500 lines."""
    page = (_ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    modules = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", page, flags=re.MULTILINE)
    assert 0 < len(modules) <= 12
    paths = [_ROOT / "ray_fracbackend" / name for name in modules]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) <= 2500
