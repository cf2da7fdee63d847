"""Plant one fault among real helper processes on separate nodes, and run the search for the fault.

As a program it makes random plantings and counts how many were found: ``net_faults.py NUMBER [SEED]``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from net_calls import find_alone, open_finder
from net_nodes import Node, Switch, Worker

from ray_fracbackend.isolation.faults import Fault, Findings, diagnose, num_rounds, partner, peers_of
from ray_fracbackend.isolation.helper import HelperAddress, HelperTask

LINK_S, ROUND_S = 2.5, 1.5
KINDS = (
    "silent rank",
    "wrong rank",
    "slow rank",
    "cut rank",
    "boundary",
    "cut link",
    "one-way link",
    "slow link",
    "scale",
)
# Smallest number of ranks with which a fault can be located.
_SMALLEST = {"boundary": 5, "cut rank": 3, "wrong rank": 3}


@dataclass(frozen=True)
class Planting:
    """A fault and its place; a one-way link passes packets from its first rank to its second."""

    kind: str
    ranks: tuple[int, ...]
    world_size: int

    @classmethod
    def random(cls, rng: random.Random, largest: int, kind: str | None = None) -> Planting:
        kind = kind or rng.choice(KINDS)
        size = rng.randint(_SMALLEST.get(kind, 2), largest)
        if kind == "scale":
            return cls(kind, (), size)
        if kind == "boundary":
            return cls(kind, tuple(sorted(rng.sample(range(size), rng.randint(2, (size - 1) // 2)))), size)
        return cls(kind, tuple(rng.sample(range(size), 2 if "link" in kind else 1)), size)

    def named_by(self, faults: Sequence[Fault]) -> bool:
        return [(fault.kind, set(fault.ranks)) for fault in faults] == [(self.kind, set(self.ranks))]


@contextmanager
def network(largest: int) -> Iterator[list[Node]]:
    """Connect nodes to one switch, one node for each rank."""
    name = f"rfb-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    nodes: list[Node] = []
    switch = None
    try:
        nodes.extend(Node(f"{name}-{number}", f"node-{number}", number + 1) for number in range(largest))
        switch = Switch(f"{name}-switch", nodes)
        for node in nodes:
            node.start_agent()
        yield nodes
    finally:
        for node in nodes:
            node.close()
        if switch is not None:
            switch.close()


def search(nodes: Sequence[Node], planting: Planting) -> list[Fault]:
    """Return the diagnosis of a planted fault, from a new process on each node; afterwards repair the network."""
    nodes = nodes[: planting.world_size]
    with tempfile.TemporaryDirectory() as folder:
        try:
            workers = [node.spawn(Path(folder)) for node in nodes]
            helpers = {
                rank: HelperAddress(**worker.call(open_finder, node.ip, GLOO_SOCKET_IFNAME="eth0"))
                for rank, (node, worker) in enumerate(zip(nodes, workers, strict=True))
            }
            with _planted(nodes, workers, planting):
                return diagnose(_findings(workers, helpers, planting), [f"rank {rank}" for rank in helpers])
        finally:
            for node in nodes:
                node.reset()


def _findings(workers: Sequence[Worker], helpers: dict[int, HelperAddress], planting: Planting) -> dict[int, Findings]:
    size, token = planting.world_size, uuid.uuid4().hex
    for rank, worker in enumerate(workers):
        task = HelperTask(
            rank=rank,
            token=token,
            peers={peer: helpers[peer] for peer in peers_of(rank, size)},
            partners=tuple(partner(rank, number, size) for number in range(num_rounds(size))),
            device="cpu",
            link_s=LINK_S,
            round_s=ROUND_S,
        )
        worker.send(find_alone, json.dumps(asdict(task)), planting.kind == "wrong rank" and rank in planting.ranks)
    end = time.monotonic() + LINK_S + num_rounds(size) * ROUND_S + 3
    answers = {rank: worker.answer(end) for rank, worker in enumerate(workers)}
    return {r: Findings.from_json(found) for r, found in answers.items() if not isinstance(found, BaseException)}


@contextmanager
def _planted(nodes: Sequence[Node], workers: Sequence[Worker], planting: Planting) -> Iterator[None]:
    inside = set(planting.ranks)
    outside = [rank for rank in range(planting.world_size) if rank not in inside]
    if planting.kind in ("cut rank", "boundary"):
        for rank in inside:
            drop(nodes[rank], [nodes[other].ip for other in outside], ("saddr", "daddr"))
    elif planting.kind == "cut link":
        drop(nodes[planting.ranks[0]], [nodes[planting.ranks[1]].ip], ("saddr", "daddr"))
    elif planting.kind == "one-way link":
        drop(nodes[planting.ranks[1]], [nodes[planting.ranks[0]].ip], ("daddr",))
    elif planting.kind == "slow link":
        drop(nodes[planting.ranks[0]], [nodes[planting.ranks[1]].ip], ("daddr",), "limit rate over 16 kbytes/second ")
    elif planting.kind == "silent rank":
        os.kill(workers[planting.ranks[0]].pid, signal.SIGSTOP)
    elif planting.kind == "slow rank":
        with _starved(workers[planting.ranks[0]].pid):
            yield
        return
    yield


def drop(node: Node, addresses: Sequence[str], directions: Sequence[str], limit: str = "") -> None:
    """Drop a node's packets from (``saddr``) and to (``daddr``) these addresses."""
    chains = [f"add chain inet t {hook} {{ type filter hook {hook} priority 0; }}" for hook in ("input", "output")]
    rules = ["add table inet t", *chains]
    for direction in directions:
        hook = "input" if direction == "saddr" else "output"
        rules.append(f"add rule inet t {hook} ip {direction} {{ {', '.join(addresses)} }} {limit}drop")
    node.execute("nft", "; ".join(rules))


@contextmanager
def _starved(pid: int) -> Iterator[None]:
    """Give the process only a hundredth of its time."""
    stop = threading.Event()

    def run() -> None:
        with suppress(ProcessLookupError):
            while not stop.is_set():
                os.kill(pid, signal.SIGSTOP)
                stop.wait(0.198)
                os.kill(pid, signal.SIGCONT)
                stop.wait(0.002)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def main() -> None:
    number = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)
    rng = random.Random(seed)
    missed = []
    with network(16) as nodes:
        for count in range(number):
            planting = Planting.random(rng, 16)
            faults = search(nodes, planting)
            if not planting.named_by(faults):
                missed.append(planting)
            print(f"{count + 1}: {planting} named {planting.named_by(faults)}", *faults, sep="\n    ", flush=True)
    print(f"seed {seed}: {number - len(missed)} of {number} named")


if __name__ == "__main__":
    main()
