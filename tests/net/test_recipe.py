"""The pages of docs/recipes with two nodes: their commands end as the pages say, with the outputs that the pages have."""

from __future__ import annotations

import shutil
import sys

import pytest
from net_nodes import REPOSITORY

sys.path.append(str(REPOSITORY / "ci"))

import recipes

_NAMES = sorted(path.stem for path in recipes.PAGES.glob("*.md"))


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs the command nft (package nftables)")
@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in _NAMES if "two-nodes" in recipes.read(name).options])
def test_page(name: str) -> None:
    """Real failures behind a real firewall, and real jobs on a cluster: addresses, ports and times may differ from the page."""
    found = recipes.problems(name)
    assert not found, "\n".join(found)
