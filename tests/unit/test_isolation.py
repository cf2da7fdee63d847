"""The search for the fault: the diagnosis of planted faults, and the tests of a rank over real sockets on this machine."""

from __future__ import annotations

import copy
import random
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.errors import (
    FracBackendError,
    GroupFormationError,
    RendezvousError,
    VerificationError,
    WorkerDiedError,
)
from ray_fracbackend.start.isolation import rank_tests, search
from ray_fracbackend.start.isolation.faults import MAX_MESH, Findings, diagnose, link_targets

KINDS = ("silent rank", "device", "cut node", "cut link", "no connections from", "nothing")
WORD = b"sixteen bytes ok"


def on_nodes(*sizes: int) -> list[WorkerAddress]:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    return [WorkerAddress(rank, f"10.0.0.{node}", 4711 + rank, f"node{node}") for rank, node in enumerate(nodes)]


def planted(kind: str, rng: random.Random, num_nodes: int) -> tuple[dict[int, Findings], set[int], Any, set[int]]:
    """Return findings, silent ranks and addresses with one fault, and the ranks at fault."""
    addresses = on_nodes(*(rng.randint(1, 4) for _ in range(num_nodes)))
    nodes: dict[str, set[int]] = {}
    for address in addresses:
        nodes.setdefault(address.node_id, set()).add(address.rank)
    one = rng.randrange(num_nodes)
    other = (one + 1) % num_nodes  # also tested if there are many nodes
    rank, first, second = rng.randrange(len(addresses)), nodes[f"node{one}"], nodes[f"node{other}"]

    def is_reached(source: int, target: int) -> bool:
        if kind == "cut node":
            return (source in first) == (target in first)
        forward, back = source in first and target in second, source in second and target in first
        return not (forward or back) if kind == "cut link" else not (forward and kind == "no connections from")

    silent = {rank} if kind == "silent rank" else set()
    findings = {
        source: Findings(
            device_fault="broken" if kind == "device" and source == rank else "",
            links={target: is_reached(source, target) for target in targets if target not in silent},
        )
        for source, targets in enumerate(link_targets(addresses))
        if source not in silent
    }
    at_fault = {"silent rank": {rank}, "device": {rank}, "cut node": first, "nothing": set()}
    return findings, silent, addresses, at_fault.get(kind, first | second)


@pytest.mark.parametrize("kind", KINDS)
def test_one_planted_fault_is_named(kind: str) -> None:
    """Only the planted fault, with its ranks and no others."""
    rng = random.Random(kind)
    for num_nodes in [*range(3, 20), MAX_MESH, MAX_MESH + 1, 200]:
        findings, silent, addresses, at_fault = planted(kind, rng, num_nodes)
        faults = diagnose(findings, silent, addresses)
        assert [set(fault.ranks) for fault in faults] == ([at_fault] if at_fault else [])


def test_the_text_of_each_fault() -> None:
    """Ranks, nodes and processes, and the direction if only one fails."""
    addresses = on_nodes(1, 1)
    first, second = "rank 0 (node 10.0.0.0, pid 4711)", "rank 1 (node 10.0.0.1, pid 4712)"
    both, one = {0: Findings(links={1: False}), 1: Findings(links={0: False})}, {0: Findings(links={1: True})}
    one[1] = Findings(links={0: False}, device_fault="CUDA error: uncorrectable ECC error encountered")
    assert [fault.text for fault in diagnose(both, {}, addresses)] == [f"no connections between {first} and {second}"]
    assert [fault.text for fault in diagnose(one, {}, addresses)] == [
        f"the device of {second} fails in a test without other ranks (CUDA error: uncorrectable ECC error encountered)",
        f"no connections from {second} to {first}",
    ]
    assert [fault.text for fault in diagnose({1: Findings()}, {0}, addresses)] == [
        f"no answer from {first}: the process is stopped, or it or its device hangs"
    ]


def test_links_are_between_nodes_and_bounded() -> None:
    """Every rank tests a link to one rank of each other node, of many nodes only to some; both ends test each link."""
    assert link_targets(on_nodes(2, 3, 1)) == [[2, 5], [3, 5], [5, 0], [5, 1], [5, 0], [0, 2]]
    assert link_targets(on_nodes(8)) == [[]] * 8
    peers = link_targets(on_nodes(*[1] * 1000))
    assert {len(each) for each in peers} == {18}
    assert all(rank in peers[peer] for rank, each in enumerate(peers) for peer in each)


def listener(master_addr: str = "127.0.0.1", word: bytes = WORD, life_s: float = 30) -> tuple[str, int]:
    return rank_tests.open_listener(master_addr, word, life_s)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_only_a_listener_of_this_search_is_reached(address: str) -> None:
    """Not a closed port, a server that says nothing, or another search's listener."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as mute, socket.create_server(("127.0.0.1", 0)) as closing:
        closed = closing.getsockname()[:2]
        closing.close()
        peers = {1: listener(address), 2: closed, 3: mute.getsockname()[:2], 4: listener(word=b"some other word.")}
        found = rank_tests.run_tests("cpu", peers, WORD, 2.0)
    assert found == Findings(links={1: True, 2: False, 3: False, 4: False})


def test_strangers_do_not_keep_a_peer_from_its_listener() -> None:
    """They connect and do not read, or send something. After its time the port is closed."""
    life_s = 4.0
    begun = time.monotonic()
    address = listener(life_s=life_s)
    strangers = [socket.create_connection(address) for _ in range(100)]
    try:
        for stranger in strangers[:50]:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        assert rank_tests.run_tests("cpu", {1: address}, WORD, 5.0).links == {1: True}
        time.sleep(max(0.0, begun + life_s + 1 - time.monotonic()))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), False),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), False),
        (RuntimeError("CUDA error: invalid device ordinal"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server"), False),
        (RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"), False),
        (AssertionError("Torch not compiled with CUDA enabled"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasDgemm(...)`"), True),
        (RuntimeError("CUDA error: invalid device function"), True),
    ],
)
def test_a_device_that_could_not_be_tested_is_not_at_fault(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_fault: bool
) -> None:
    """CUDA's errors are quoted, unless they are about memory or the process."""

    def fail(device: object) -> bool:
        raise error

    monkeypatch.setattr(rank_tests, "sums_are_right", fail)
    assert rank_tests.run_tests("cpu", {}, WORD, 1.0) == Findings(device_fault=str(error) if is_fault else "")


class Group:
    """A worker group of threads; calls of some ranks do not end, or raise."""

    def __init__(self, outcomes: Mapping[int, BaseException | None]) -> None:
        self._outcomes, self._pool = outcomes, ThreadPoolExecutor(8)
        self.asked: set[int] = set()

    def execute_single_async(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        self.asked.add(rank)
        return None if rank in self._outcomes else self._pool.submit(function, *args), self._outcomes.get(rank)


def collected(refs: list[Any], timeout_s: float) -> list[Any]:
    return [(None, error) if error else None if future is None else (future.result(), None) for future, error in refs]


STALLED = VerificationError("barrier failed.", ranks=[1], kind="stalled", step="starting gloo")
NOT_REACHED = GroupFormationError("Gloo failed.", cause="Gloo connectFullMesh failed: timed out")


@pytest.mark.parametrize(
    ("error", "outcomes", "busy", "ranks", "said"),
    [
        (STALLED, {}, (), (1,), None),
        (STALLED, {2: None}, (), (1, 2), "barrier failed. Search for the fault: no answer from rank 2 "),
        (STALLED, {2: None}, (2,), (1,), None),
        (NOT_REACHED, {2: None}, (), (2,), "Gloo failed. Search for the fault: no answer from rank 2 "),
        (STALLED, {2: OSError("cannot listen")}, (), (1,), None),
        (STALLED, {2: ActorDiedError()}, (), (2,), "rank 2 (node 10.0.0.2, pid 4713) died during"),
    ],
)
def test_the_search_adds_ranks(
    monkeypatch: pytest.MonkeyPatch, error: FracBackendError, outcomes: Any, busy: Any, ranks: Any, said: str | None
) -> None:
    """The ranks that the error named stay; a rank that cannot be tested is not at fault; a dead one is a dead worker.

    A rank that is busy in the start is not asked: a call to it would wait for the start, so it says nothing about the rank.
    """
    monkeypatch.setattr(search, "collect", collected)
    group = Group(outcomes)
    plans: list[Any] = [SimpleNamespace(rank=rank, device="cpu", master_addr="127.0.0.1") for rank in range(3)]
    found = search.with_faults(copy.copy(error), group, plans, on_nodes(1, 1, 1), 20.0, busy)
    assert type(found) is (WorkerDiedError if "died" in str(said) else type(error))
    assert found.ranks == ranks
    assert str(found) == str(error) if said is None else str(found).startswith(said)
    assert group.asked == {0, 1, 2} - {*busy}


@pytest.mark.parametrize(
    ("error", "busy"),
    [
        (RendezvousError("rank 1 raised OSError", ranks=[1]), ()),
        (VerificationError("wrong sum.", ranks=[1], kind="wrong_answer"), ()),
        (GroupFormationError("Gloo failed.", ranks=[1], kind="failed", cause="bind: Address already in use"), ()),
        (STALLED, {1}),
    ],
)
def test_no_search_if_the_fault_is_known(error: FracBackendError, busy: Any) -> None:
    """A rank has said what is wrong, or the error names one that still hangs: all waits of a start have ended by then."""
    assert search.with_faults(error, None, [], [], 20.0, busy) is error
