"""The diagnosis from the findings of all ranks, with a model of a network with one planted fault."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from ray_fracbackend.errors import VerificationError
from ray_fracbackend.isolation import helper as isolation_helper
from ray_fracbackend.isolation import search
from ray_fracbackend.isolation.faults import (
    MAX_MESH,
    Fault,
    Findings,
    LinkFinding,
    PairFinding,
    diagnose,
    num_rounds,
    partner,
    peers_of,
)
from ray_fracbackend.timeouts import Deadline

KINDS = (
    "silent rank",
    "wrong rank",
    "wrong sums",
    "slow rank",
    "starved rank",
    "cut rank",
    "boundary",
    "cut link",
    "one-way link",
    "slow link",
    "pair",
    "scale",
)


def model(kind: str, ranks: tuple[int, ...], world_size: int, rng: random.Random) -> dict[int, Findings]:
    """Return the findings of all ranks if `kind` is planted at `ranks`."""

    def crosses(i: int, j: int) -> bool:
        return (i in ranks) != (j in ranks)

    def link(i: int, j: int) -> LinkFinding:
        on_it = {i, j} == set(ranks)
        dead = kind == "silent rank" and (i in ranks or j in ranks)
        cut = dead or (kind == "cut link" and on_it) or (kind in ("cut rank", "boundary") and crosses(i, j))
        one_way = kind == "one-way link" and on_it
        slow = (kind in ("slow rank", "starved rank") and crosses(i, j)) or (kind == "slow link" and on_it)
        seconds = rng.uniform(0.001, 0.02) * (200 if slow else 1) + (1.0 if slow else 0.0)
        endless = cut or one_way or (slow and rng.random() < 0.3)
        return LinkFinding(
            connected=not cut and not one_way,
            # Packets pass only from the first rank of a one-way link to the second.
            heard=not cut and (not one_way or (j, i) == ranks),
            seconds=None if endless else seconds,
        )

    def pair(i: int, j: int) -> PairFinding:
        if not link(i, j).connected or (kind == "pair" and {i, j} == set(ranks)):
            return PairFinding(peer=j, outcome="failed", error="connectFullMesh failed")
        wrong = kind == "wrong rank" and (i in ranks or j in ranks)
        return PairFinding(peer=j, outcome="wrong" if wrong else "ok", seconds=0.01)

    found = {}
    for rank in range(world_size):
        if kind == "silent rank" and rank in ranks:
            continue
        partners = [partner(rank, number, world_size) for number in range(num_rounds(world_size))]
        starved = kind == "starved rank" and rank in ranks
        found[rank] = Findings(
            right=not (kind == "wrong sums" and rank in ranks),
            seconds=None if starved and rng.random() < 0.5 else rng.uniform(0.005, 0.03) + (2 if starved else 0),
            links={peer: link(rank, peer) for peer in peers_of(rank, world_size)},
            pairs=[pair(rank, peer) for peer in partners if peer is not None],
        )
    return found


def plant(kind: str, world_size: int, rng: random.Random) -> tuple[int, ...]:
    if kind == "scale":
        return ()
    if kind == "boundary":
        return tuple(sorted(rng.sample(range(world_size), rng.randint(2, (world_size - 1) // 2))))
    if kind == "pair":
        rank = rng.randrange(world_size - 1) & ~1
        return rank, rank + 1
    return tuple(rng.sample(range(world_size), 2 if "link" in kind else 1))


def smallest(kind: str) -> int:
    """Return the smallest world size in which a fault is distinguishable: with only one peer a rank's fault is also its link's."""
    return {"boundary": 5, "cut rank": 3, "slow rank": 3, "wrong rank": 3}.get(kind, 2)


def verdict(kind: str) -> str:
    return {"wrong sums": "wrong rank", "starved rank": "slow rank"}.get(kind, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_one_planted_fault_is_named(kind: str) -> None:
    """For every world size from 2 to 16 and random positions, the diagnosis is the kind and the ranks and nothing else."""
    rng = random.Random(7)
    for number in range(300):
        world_size = rng.randint(smallest(kind), 16)
        ranks = plant(kind, world_size, rng)
        faults = diagnose(model(kind, ranks, world_size, rng), [f"rank {rank}" for rank in range(world_size)])
        found = [(fault.kind, set(fault.ranks)) for fault in faults]
        assert found == [(verdict(kind), set(ranks))], (number, world_size, ranks, faults)


@pytest.mark.parametrize("kind", ["cut rank", "cut link", "slow rank", "wrong rank"])
def test_a_fault_among_thousands_is_named(kind: str) -> None:
    """Only some links are tested, but they are enough, and the diagnosis comes while the start still waits for it."""
    ranks = (6, 7) if kind == "cut link" else (77,)
    faults = diagnose(model(kind, ranks, 2000, random.Random(1)), [f"rank {rank}" for rank in range(2000)])
    assert [(fault.kind, fault.ranks) for fault in faults] == [(kind, ranks)]


def test_a_rank_that_alone_sees_wrong_answers_is_named_among_two() -> None:
    """If only one side of the only pair has a wrong result, that side is named."""
    found = model("scale", (), 2, random.Random(1))
    wrong = PairFinding(peer=0, outcome="wrong", seconds=0.01)
    found[1] = Findings(right=True, seconds=found[1].seconds, links=found[1].links, pairs=[wrong])
    (fault,) = diagnose(found, ["rank 0", "rank 1"])
    assert (fault.kind, fault.ranks) == ("wrong rank", (1,))
    assert fault.text == "rank 1 gets wrong results in collectives with rank 0"


def test_two_that_both_see_wrong_answers_are_named_both() -> None:
    """With two ranks there is no third rank to compare with."""
    (fault,) = diagnose(model("wrong rank", (0,), 2, random.Random(1)), ["rank 0", "rank 1"])
    assert fault == Fault("wrong rank", (0, 1), "rank 0 or rank 1 gets wrong results in collectives")


def test_a_firewall_is_distinguished_from_a_cut() -> None:
    """Datagrams pass but connections do not, in one or both directions."""
    for other, expected in (
        (False, "passes UDP datagrams but no TCP connections: a firewall"),
        (True, "only rank 1 can open"),
    ):
        found = model("scale", (), 4, random.Random(1))
        for i, j, connected in ((0, 1, False), (1, 0, other)):
            links = {**found[i].links, j: LinkFinding(connected=connected, heard=True)}
            found[i] = Findings(right=True, seconds=0.01, links=links, pairs=found[i].pairs)
        (fault,) = diagnose(found, [f"rank {rank}" for rank in range(4)])
        assert fault.ranks == (0, 1)
        assert expected in fault.text


def test_the_direction_of_a_one_way_link_is_reported() -> None:
    """The rank that receives nothing is at the failing end."""
    (fault,) = diagnose(model("one-way link", (3, 1), 5, random.Random(1)), [f"rank {rank}" for rank in range(5)])
    assert "passes packets from rank 3 to rank 1 but none back" in fault.text


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 7, 8, 100, 1000])
def test_rounds_pair_every_rank_with_every_part_of_the_job(world_size: int) -> None:
    """There are ceil(log2 N) rounds, each rank is in at most one pair per round, and partners agree."""
    rounds = num_rounds(world_size)
    assert rounds == math.ceil(math.log2(world_size))
    for number in range(rounds):
        for rank in range(world_size):
            other = partner(rank, number, world_size)
            assert other is None or partner(other, number, world_size) == rank
    for rank in range(world_size):
        peers = peers_of(rank, world_size)
        assert rank not in peers
        assert len(peers) == world_size - 1 if world_size <= MAX_MESH else len(peers) <= rounds + 2
        assert all(rank in peers_of(peer, world_size) for peer in peers)


def test_findings_survive_json() -> None:
    """A helper prints the findings as JSON, and its worker reads them."""
    for findings in model("one-way link", (0, 2), 3, random.Random(3)).values():
        assert Findings.from_json(json.loads(json.dumps(asdict(findings)))) == findings


def sound(world_size: int) -> dict[int, Findings]:
    return model("scale", (), world_size, random.Random(0))


def test_an_untested_device_is_not_at_fault() -> None:
    """Out of memory beside the worker is not a fault of the device; it is reported only if nothing else was found."""
    findings = sound(4)
    findings[1] = replace(findings[1], seconds=0.0, untried="CUDA out of memory")
    (fault,) = diagnose(findings, [f"rank {rank} (node n{rank})" for rank in range(4)])
    assert (fault.kind, fault.ranks) == ("scale", ())
    assert fault.text.endswith("; the device of rank 1 (node n1) could not be tested (CUDA out of memory)")


def test_an_untested_device_is_not_reported_beside_a_fault() -> None:
    """If a link is at fault, a full device is not reported, because it explains nothing."""
    findings = model("cut link", (1, 2), 4, random.Random(0))
    findings[0] = replace(findings[0], seconds=0.0, untried="CUDA out of memory")
    (fault,) = diagnose(findings, [f"rank {rank}" for rank in range(4)])
    assert (fault.kind, "could not be tested" in fault.text) == ("cut link", False)


def test_many_untested_devices() -> None:
    """One full GPU with many ranks is quoted only for some of them, so the message stays short."""
    findings = {rank: replace(each, seconds=0.0, untried="full") for rank, each in sound(64).items()}
    (fault,) = diagnose(findings, [f"rank {rank}" for rank in range(64)])
    assert fault.text.count("(full)") == 4
    assert fault.text.endswith("(full); nor could the devices of ranks 4,5,6,7,8,9,10,11,... (60 in all)")


@pytest.mark.parametrize("world_size", [2, 5])
def test_slow_on_all_ranks_is_no_ranks_fault(world_size: int) -> None:
    """If a device starts slowly on all ranks, other findings decide."""
    findings = {rank: replace(each, seconds=None) for rank, each in sound(world_size).items()}
    (fault,) = diagnose(findings, [f"rank {rank}" for rank in range(world_size)])
    assert (fault.kind, fault.ranks) == ("scale", ())


def test_a_device_that_fails_by_itself_is_named() -> None:
    """An error of the device is a finding with CUDA's message, not a wrong sum."""
    findings = sound(3)
    findings[2] = replace(findings[2], seconds=0.0, failure="CUDA error: uncorrectable ECC error encountered")
    (fault,) = diagnose(findings, [f"rank {rank}" for rank in range(3)])
    assert (fault.kind, fault.ranks) == ("failing device", (2,))
    assert (
        fault.text
        == "the device of rank 2 failed in a test without other ranks (CUDA error: uncorrectable ECC error encountered)"
    )
    assert Findings.from_json(json.loads(json.dumps(asdict(findings[2])))) == findings[2]


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), "untried"),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "untried"),
        (RuntimeError("CUDA error: invalid device ordinal"), "untried"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "untried"),
        (
            RuntimeError("CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server"),
            "untried",
        ),
        (RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"), "untried"),
        (AssertionError("Torch not compiled with CUDA enabled"), "untried"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "failure"),
        (RuntimeError("CUDA error: unspecified launch failure"), "failure"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasDgemm(...)`"), "failure"),
        (RuntimeError("CUDA error: invalid device function"), "failure"),
    ],
)
def test_only_a_compared_sum_is_wrong(monkeypatch: pytest.MonkeyPatch, error: Exception, field: str) -> None:
    """CUDA's errors are quoted and never reported as a wrong sum."""

    def fail(device: object) -> bool:
        raise error

    monkeypatch.setattr(isolation_helper, "sums_are_right", fail)
    task = SimpleNamespace(device="cpu", link_s=3.0)
    found = isolation_helper.Helper._alone(None, task)  # type: ignore[arg-type]
    assert (found.right, getattr(found, field)) == (True, str(error))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where torch sees no CUDA device")
def test_a_device_that_the_helper_does_not_have() -> None:
    """torch's own error of any class does not end the helper, and the device is not at fault."""
    found = isolation_helper.Helper._alone(None, SimpleNamespace(device="cuda:0", link_s=30.0))  # type: ignore[arg-type]
    assert (found.right, found.failure) == (True, "")
    assert found.untried


def test_seconds_are_measured_on_a_fine_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows time.monotonic() advances every 16 ms, but shorter sums and links still have a duration."""
    clock = SimpleNamespace(monotonic=lambda: 1000.0, perf_counter=time.perf_counter, sleep=time.sleep)
    monkeypatch.setattr(isolation_helper, "time", clock)
    task = SimpleNamespace(device="cpu", link_s=90.0)
    assert isolation_helper.Helper._alone(None, task).seconds > 0  # type: ignore[arg-type, operator]
    helper = isolation_helper.Helper("127.0.0.1")
    threading.Thread(target=helper._answer, args=(b"token",), daemon=True).start()
    connected, seconds = isolation_helper._try_link(helper.address, "token", 1030.0)
    assert connected
    assert seconds is not None
    assert seconds > 0


def test_a_rank_that_is_busy_in_the_start_is_not_silent():
    """A call to it waits for the start, so it says nothing about the rank."""
    findings = {
        rank: replace(found, pairs=()) for rank, found in model("silent rank", (1,), 4, random.Random(0)).items()
    }
    where = [f"rank {rank}" for rank in range(4)]
    assert [fault.kind for fault in diagnose(findings, where)] == ["silent rank"]
    assert [fault.kind for fault in diagnose(findings, where, busy={1})] == ["scale"]


def test_the_search_adds_ranks(monkeypatch):
    """The ranks that the error named stay."""
    monkeypatch.setattr(search, "find_faults", lambda *args: [Fault("cut rank", (2,), "rank 2 is cut off")])
    error = VerificationError("barrier failed.", ranks=[1], kind="stalled")
    found = search.with_faults(error, None, [], [], Deadline(20), 60.0, {1})
    assert found.ranks == (1, 2)
    assert str(found) == "barrier failed. Search for the fault: rank 2 is cut off."
