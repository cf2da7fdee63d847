"""Fixtures for tests with network namespaces. Everything that they create has a unique name and is removed at the end."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_nodes import Node, address, join, why_not

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
    name = f"rfb-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    nodes: list[Node] = []
    try:
        nodes += [Node(f"{name}-a", "node-a", 1)]
        nodes += [Node(f"{name}-b", "node-b", 2)]
        join(*nodes)
        for node in nodes:
            node.start_agent()
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.close()


@pytest.fixture
def two_nodes(joined_nodes: tuple[Node, Node]) -> Iterator[tuple[Node, Node]]:
    """Two connected nodes in their normal state: correct names, no filters, both IP versions."""
    yield joined_nodes
    for node in joined_nodes:
        node.reset()
        address(node, "eth0")
