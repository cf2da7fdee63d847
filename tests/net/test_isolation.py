"""The search for the fault of a failed start, with real processes and sockets on separate nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from net_nodes import Node, Switch, Worker, network, run

from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.start.isolation.search import find_faults
from tests.unit.builders import worker_plan

NUM_NODES = 4


@pytest.fixture(scope="module")
def nodes_and_switch() -> Iterator[tuple[list[Node], Switch]]:
    """One node for each rank."""
    with network(NUM_NODES) as nodes_and_switch:
        yield nodes_and_switch


def lose(node: Node, *others: Node) -> None:
    """Send the node's packets to the others to a device that does not exist."""
    for other in others:
        node.ip_command("neigh", "replace", other.ip, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")


def plant(kind: str, nodes: list[Node], switch: Switch, workers: list[Worker]) -> None:
    if kind == "silent rank":
        os.kill(workers[1].pid, signal.SIGSTOP)
    if kind == "cut rank":
        lose(nodes[1], nodes[0], nodes[2], nodes[3])
    if kind == "cut link":
        lose(nodes[1], nodes[2])
    if kind == "small packets":  # the switch drops larger ones, without a message to the sender
        run("ip", "-n", switch.name, "link", "set", "port1", "mtu", "600")
        for node in nodes:
            node.ip_command("link", "set", "eth0", "gso_max_segs", "1")


def repair(nodes: list[Node], switch: Switch) -> None:
    run("ip", "-n", switch.name, "link", "set", "port1", "mtu", "1500")
    for node in nodes:
        node.ip_command("link", "set", "eth0", "gso_max_segs", "65535")
        node.ip_command("neigh", "flush", "dev", "eth0", "nud", "permanent")
        node.reset()


def search(nodes: list[Node], workers: list[Worker]) -> list[tuple[tuple[int, ...], str]]:
    def call(function: Any, arguments: Mapping[int, Any], timeout_s: float) -> Any:
        end = time.monotonic() + timeout_s
        for rank, each in arguments.items():
            workers[rank].send(function, *each)
        answers = {rank: workers[rank].answer(end) for rank in arguments}
        return {rank: answer for rank, answer in answers.items() if not isinstance(answer, BaseException)}, {}

    common = {"world_size": NUM_NODES, "master_addr": nodes[0].ip}
    plans = {rank: worker_plan(rank=rank, **common) for rank in range(NUM_NODES)}
    addresses = [WorkerAddress(rank, node.ip, workers[rank].pid, node.name) for rank, node in enumerate(nodes)]
    faults, failures = find_faults(call, plans, addresses, 15)
    assert failures == {}
    return [(fault.ranks, fault.text.partition("rank")[0]) for fault in faults]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("no fault", []),
        ("silent rank", [((1,), "no answer from ")]),
        ("cut rank", [((1,), "no connections between other nodes and ")]),
        ("cut link", [((1, 2), "no connections between ")]),
        ("small packets", [((1,), "no connections between other nodes and ")]),
    ],
)
def test_a_planted_fault_is_named(
    nodes_and_switch: tuple[list[Node], Switch], tmp_path: Path, kind: str, found: list[tuple[tuple[int, ...], str]]
) -> None:
    """The search names the fault and its ranks, and nothing else."""
    nodes, switch = nodes_and_switch
    try:
        workers = [node.spawn(tmp_path) for node in nodes]
        for worker in workers:
            worker.call(os.getpid)
        plant(kind, nodes, switch, workers)
        assert search(nodes, workers) == found
    finally:
        repair(nodes, switch)
