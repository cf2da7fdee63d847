"""A fault of a rank in a collective: no rank hangs, each has the right error, nothing leaks.

A rank is killed, is stopped or fails at every point of a call; it makes another call than the others, or one too many or too few. By
default a sample runs, the same each time; with --full all of it, and another sample. The seed is printed; set RAY_FRACBACKEND_TEST_SEED to
repeat it.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from ipc_calls import CALLS, NUMEL, SMALL_CHUNKS, SMALL_NUMEL, Call, Error, Point, bare_group, error_of, points
from ipc_harness import Job, run_ranks, values
from ipc_memories import check_exceptions, check_signal

from ray_fracbackend.ipc.protocol.schedule import WRITTEN, Action
from tests.processes import wait_until
from tests.soak.belongings import belongings

SEED_ENV_VAR = "RAY_FRACBACKEND_TEST_SEED"
SIZE = 3
# Limit of a call, and of groups, which are created one after another while other tests may use the machine.
TIMEOUT_S, SETUP_TIMEOUT_S = 40.0, 150.0
# Maximum time for a rank to raise an error; large, because these tests share their cores.
MARGIN_S = 10.0
BARRIER = CALLS["barrier"]
full = pytest.mark.full


@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
@pytest.mark.parametrize(
    "name", ["all_reduce", *(pytest.param(name, marks=full) for name in CALLS if name != "all_reduce")]
)
def test_a_struck_rank_is_reported_at_every_point(name: str, kind: str, full: bool) -> None:
    """A sample of them by default; the others raise an error with the reason, at once or at the deadline."""
    if kind != "raise":
        check_signal(name, kind, SMALL_CHUNKS, points(CALLS[name], SIZE)[:: 1 if full else 4], "host")
    elif name == "all_reduce":
        check_exceptions(SIZE, SMALL_CHUNKS, "host")


@dataclass(frozen=True)
class Case:
    """Ranks that disagree about their calls.

    Attributes:
        calls: Calls of all ranks except the victim, in this order.
        victim_calls: Calls of the victim.
        error: Class of the error.
        texts: Texts that the error must contain.
        victim: Rank of the victim.
        differs_at: Number of calls before the one in which the ranks disagree.
        peers: Position of the peers when the victim's other call begins: "any", "waiting" for it, or "queued": all calls are in queues.
    """

    calls: tuple[Call, ...]
    victim_calls: tuple[Call, ...]
    error: str
    texts: tuple[str, ...]
    victim: int = 0
    differs_at: int = 0
    peers: str = "any"

    def __str__(self) -> str:
        what = f"{' '.join(map(str, self.victim_calls))} for {' '.join(map(str, self.calls))}"
        return f"[rank {self.victim}: {what}, peers {self.peers}]"


def variants(call: Call) -> list[tuple[Call, tuple[str, ...]]]:
    """Return calls that differ from `call` in one property, with the text of both in messages."""
    if call.name == "barrier":
        return []
    different = [replace(call, dtype=torch.int32)]
    if call.reduces():
        different.append(replace(call, op="MAX"))
    if call.has_root():
        different.append(replace(call, root=1))
    if call.name == "all_reduce":
        different.append(replace(call, sparse=True))
    longer = [replace(call, numel=call.numel + more) for more in (1, NUMEL)]
    if not call.name.startswith("all_to_all"):
        return [(other, (str(call), str(other))) for other in different + longer]
    # Sizes may differ by pair there, but both sides of a pair must agree.
    sizes = [(other, (f"{4 * call.numel}", f"{4 * other.numel}", " sends ", "which expects")) for other in longer]
    return [*((other, (str(call), str(other))) for other in different), *sizes]


def mismatches(call: Call) -> Iterator[Case]:
    """Yield cases in which the victim makes another call, one too many or one too few, for each position of the peers."""
    # The next calls of both sides; none may equal the call itself.
    end = BARRIER if call.name != "barrier" else Call("all_reduce", SMALL_NUMEL)
    others = variants(call)
    # A list of tensors and one tensor are the same collective.
    kind_of = lambda one: re.sub("_into_tensor|_tensor|_single", "", one.name)  # noqa: E731
    others += [(other, (str(call), str(other))) for other in CALLS.values() if kind_of(other) != kind_of(call)]
    kind = "CollectiveMismatchError"
    cases = [Case((call, end), (other, end), kind, texts) for other, texts in others]
    cases.append(Case((call, end), (call, call, end), kind, (str(end), str(call)), differs_at=1))
    cases.append(Case((call, end), (end,), kind, (str(call), str(end))))
    before = CALLS["all_gather"]
    for case in cases:
        queued = replace(
            case,
            peers="queued",
            calls=(before, *case.calls),
            victim_calls=(before, *case.victim_calls),
            differs_at=case.differs_at + 1,
        )
        yield from (case, replace(case, peers="waiting"), queued)


def leavings(call: Call) -> Iterator[Case]:
    """Yield cases in which the victim makes one call more than the others, which leave after theirs; or one less, and leaves itself."""
    texts = ("shut its process group down",)
    for peers in ("any", "queued"):
        yield Case((call,), (call, call), "PeerLostError", texts, peers=peers)
        yield Case((call, call), (call,), "PeerLostError", texts, peers=peers)


KINDS = {"mismatch": mismatches, "leave": leavings}


def cases_of(call: Call, kind: str) -> list[Case]:
    """Return all cases, each with another victim."""
    victims = itertools.cycle(range(SIZE))
    return [replace(case, victim=next(victims)) for case in KINDS[kind](call)]


def prepare(job: Job) -> dict[str, int]:
    """Make garbage collection quick and return the resources of this process after one successful group."""
    torch.set_num_threads(1)
    os.environ.update(SMALL_CHUNKS)
    gc.collect()
    gc.freeze()
    pg = bare_group(job, f"prepare{job.rank}", 0, 1, SETUP_TIMEOUT_S)
    BARRIER(pg).wait()
    pg.shutdown()
    del pg
    gc.collect()
    return held()


def held() -> dict[str, int]:
    """Return counts of what this process holds, except its memory."""
    return {name: number for name, number in belongings().items() if name != "rss_bytes"}


def play(job: Job, cases: list[Case]) -> None:
    """Run this rank's part of each case, in a new group."""
    before = prepare(job)
    for number, case in enumerate(cases):
        errors = errors_in(job, case, str(number))
        check(case, job.rank, errors)
        # An ended thread may be listed for a moment longer.
        assert wait_until(lambda: held() == before, 5), (case, before, held())


def errors_in(job: Job, case: Case, name: str) -> list[Error]:
    """Return the errors of this rank's calls, and of one more if a call has failed."""
    pg = bare_group(job, name, job.rank, SIZE, SETUP_TIMEOUT_S)
    pg.set_timeout(timedelta(seconds=TIMEOUT_S))
    is_victim = job.rank == case.victim
    calls = case.victim_calls if is_victim else case.calls
    if case.peers == "queued":
        works = [call(pg, asynchronous=True) for call in calls]
        errors = [error_of(work.wait) for work in works]
        del works
    else:
        errors = []
        for position, call in enumerate(calls):
            if case.peers == "waiting" and is_victim and position == case.differs_at:
                own = step_of(pg, case.victim)
                assert wait_until(
                    lambda own=own: all(step_of(pg, r) > own for r in range(SIZE) if r != case.victim), 30
                )
            errors.append(error_of(lambda call=call: call(pg).wait()))
            if errors[-1][0]:
                break
    errors = [*itertools.dropwhile(lambda error: not error[0], errors)]
    if errors:
        errors.append(error_of(lambda: BARRIER(pg).wait()))
    pg.shutdown()
    return errors


def step_of(pg: Any, rank: int) -> int:
    """Return the last chunk that the rank has written: between calls it is the same on all ranks."""
    control = pg._local.engine.control
    return control.words[control.counter_index[rank] + WRITTEN]


def check(case: Case, rank: int, errors: list[Error]) -> None:
    is_victim = rank == case.victim
    if case.error == "PeerLostError" and is_victim == (len(case.victim_calls) < len(case.calls)):
        assert errors == [], case  # the rank that leaves
        return
    # The first rank to notice reports the reason, and the others may receive it from that rank.
    allowed = {case.error, "GroupPoisonedError"}
    (error_type, text, seconds), *later = errors
    assert error_type in allowed, (case, rank, error_type, text)
    assert seconds < MARGIN_S, (case, rank, text)
    parts = (*case.texts, *([f"rank {case.victim}"] if case.error != "PeerLostError" else []))
    assert [part for part in parts if part not in text] == [], (case, rank, text)
    for other, text, seconds in later:
        assert other in allowed, (case, rank, other, text)
        assert seconds < MARGIN_S, (case, rank, text)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_disagree(kind: str, full: bool) -> None:
    """In a sample of collectives every rank raises the correct error in time and releases everything."""
    seed = int(os.environ.get(SEED_ENV_VAR, random.randrange(1 << 31) if full else 1))
    print(f"{SEED_ENV_VAR}={seed}")
    rng = random.Random(seed)
    several = 3 if kind == "mismatch" else 1
    cases = [case for call in CALLS.values() for case in rng.sample(cases_of(call, kind), several)]
    rng.shuffle(cases)
    values(run_ranks(play, SIZE, cases, limit_s=240))


@full
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_disagree_in_every_way(kind: str, name: str) -> None:
    """As above, for the whole table."""
    values(run_ranks(play, SIZE, cases_of(CALLS[name], kind), limit_s=240))


def actions_of(job: Job) -> dict[str, list[Point]]:
    """Return the actions that each collective really takes."""
    pg = bare_group(job, "actions", job.rank, job.size, 20.0)
    seen: dict[str, list[Point]] = {}
    for name, call in CALLS.items():
        taken: list[Action] = []
        pg._local.engine.observer = lambda action, chunk, taken=taken: taken.append(action)
        call(pg).wait()
        seen[name] = [(action, taken[:index].count(action)) for index, action in enumerate(taken)]
    pg.shutdown()
    return seen


def test_the_table_of_phases_matches_the_engine() -> None:
    """A phase missing from the table would never be tested. Some rank has each action, except waits and the number of announcements."""
    ranks = values(run_ranks(actions_of, SIZE, env=SMALL_CHUNKS))
    uncounted = (Action.AWAIT, Action.PUBLISH)
    for name, call in CALLS.items():
        seen = {point for rank in ranks for point in rank[name] if point[0] not in uncounted}
        assert seen == {point for point in points(call, SIZE) if point[0] not in uncounted}
        assert all((Action.PUBLISH, 0) in rank[name] for rank in ranks)
