"""Fixtures for tests with network namespaces. Everything that they create has a unique name and is removed at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_nodes import Node, address, network, why_not

_WHY_NOT = why_not()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.net)
            item.add_marker(pytest.mark.linux(reason="needs network namespaces"))
            if _WHY_NOT is not None and sys.platform == "linux":
                item.add_marker(pytest.mark.skip(reason=_WHY_NOT))


@pytest.fixture(scope="session")
def joined_nodes() -> Iterator[tuple[Node, Node]]:
    with network(2) as ((first, second), _):
        yield first, second


@pytest.fixture
def two_nodes(joined_nodes: tuple[Node, Node]) -> Iterator[tuple[Node, Node]]:
    """Two connected nodes in their normal state: correct names, no filters, both IP versions."""
    yield joined_nodes
    for node in joined_nodes:
        node.reset()
        address(node, "eth0")
