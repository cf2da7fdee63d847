"""The search for the fault of a failed start, with real processes, sockets and Gloo groups on separate nodes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator

import pytest
from net_faults import KINDS, Planting, network, search
from net_nodes import Node

pytestmark = pytest.mark.skipif(shutil.which("nft") is None, reason="needs the command nft (package nftables)")
# A busy machine looks like slow ranks and links.
TRIES = 3


@pytest.fixture(scope="module")
def nodes(full: bool) -> Iterator[list[Node]]:
    with network(7 if full else 3) as nodes:
        yield nodes


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_is_named(nodes: list[Node], kind: str) -> None:
    """The diagnosis is the planted fault and its ranks and nothing else. The program net_faults.py makes many more plantings."""
    planting = Planting.random(random.Random(kind), len(nodes), kind)
    found = []
    for _ in range(TRIES):
        found.append(search(nodes, planting))
        if planting.named_by(found[-1]):
            return
    raise AssertionError((planting, found))
