"""The search for the fault of a failed start, with real processes, sockets and Gloo groups on nodes of their own."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator

import pytest
from net_faults import KINDS, Planting, network, search
from net_nodes import Node

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs the command nft (package nftables)"),
]
LARGEST = 7


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with network(LARGEST) as nodes:
        yield nodes


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_named(nodes: list[Node], kind: str) -> None:
    """The verdict is the planted fault, its ranks and nothing else. The program net_faults.py makes many more plantings."""
    planting = Planting.random(random.Random(kind), LARGEST, kind)
    faults = search(nodes, planting)
    assert planting.named_by(faults), (planting, faults)
