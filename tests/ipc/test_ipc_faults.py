"""Kill, stop, exception, mismatched and missing calls at every phase of every collective: no rank hangs, nothing leaks.

By default a sample runs, the same each time; with --full a different one each time, and the whole table. The seed is printed; set
RAY_FRACBACKEND_TEST_SEED to repeat it.
"""

from __future__ import annotations

import os
import random

import pytest
from ipc_calls import CALLS, SMALL_CHUNKS, Call, Point, bare_group, points
from ipc_fault_runs import Report, play_fatal, survivors
from ipc_faults import FAULTS, MARGIN_S, SIZE, Case, cases_of, sample
from ipc_harness import Job, run_ranks, values

from ray_fracbackend.ipc.protocol.schedule import Action

SEED_ENV_VAR = "RAY_FRACBACKEND_TEST_SEED"
# Errors that the other ranks may raise. The first rank to notice reports the reason, and the others may receive it from that rank.
NOTICED = {
    "kill": "PeerLostError",
    "stop": "CollectiveTimeoutError",
    "raise": "GroupPoisonedError",
    "mismatch": "CollectiveMismatchError",
    "leave": "PeerLostError",
}
WORDS = {"kill": "died", "stop": "stopped", "raise": "injected", "leave": "shut its process group down"}


def run_cases(cases: list[Case]) -> None:
    """Run cases of one fault and check every report."""
    fatal = cases[0].fault in ("kill", "stop")
    outcomes = values(run_ranks(play_fatal if fatal else survivors, SIZE, cases, limit_s=240))
    if fatal:
        assert outcomes.pop() == []
    problems = []
    for reports in outcomes:
        assert [report.number for report in reports] == list(range(len(cases)))
        for case, report in zip(cases, reports, strict=True):
            problems += [f"{case}, rank {report.rank}: {problem}" for problem in problems_of(case, report)]
    assert not problems, "\n".join(problems)


def problems_of(case: Case, report: Report) -> list[str]:
    """Return the problems of a report."""
    error_type, text, seconds = report.first
    is_victim = report.rank == case.victim
    problems = []
    if report.leaks:
        problems.append(f"leaked {report.leaks}")
    if case.fault == "leave" and is_victim == (len(case.victim_calls) < len(case.calls)):
        # The rank that leaves need not raise an error.
        return problems + [f"raised {report.first}"] * bool(error_type)
    allowed = {NOTICED[case.fault], "GroupPoisonedError"}
    if case.fault == "raise" and is_victim:
        allowed = {"RuntimeError"}
    # A rank of another host may only notice the end of a connection, but its leader compares calls before.
    compared = case.fault == "mismatch" and case.hosts.count(case.hosts[case.victim]) == 1
    elsewhere = case.hosts[report.rank] != case.hosts[case.victim] and not compared
    if elsewhere:
        allowed.add("IpcError")
    if error_type not in allowed:
        problems.append(f"raised {report.first}")
    if seconds > MARGIN_S + (case.timeout_s if case.fault == "stop" else 0):
        problems.append(f"took {seconds} s: {text}")
    parts = case.texts or (WORDS[case.fault],)
    if case.fault in ("kill", "stop", "mismatch") or (case.fault == "raise" and not is_victim):
        parts = (*parts, f"rank {case.victim}")
    if not elsewhere:
        problems += [f"{part!r} not in {text!r}" for part in parts if part not in text]
    for later in report.rest:
        if later[0] not in allowed | {"GroupPoisonedError"} or later[2] > MARGIN_S:
            problems.append(f"a later call: {later}")
    return problems


@pytest.fixture(scope="module")
def seed(full: bool) -> int:
    """Return the seed of this run's sample."""
    return int(os.environ.get(SEED_ENV_VAR, random.randrange(1 << 31) if full else 1))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_anywhere_reaches_every_rank(seed: int, fault: str) -> None:
    """In a sample of collectives and phases every rank raises the correct error in time and releases everything."""
    print(f"{SEED_ENV_VAR}={seed}")
    run_cases(sample(seed)[fault])


@pytest.mark.full
@pytest.mark.parametrize("collective", CALLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_phase_of_every_collective_reaches_every_rank(fault: str, collective: str) -> None:
    """As above, for the whole table."""
    run_cases(cases_of(collective, fault))


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


def test_every_other_call_is_in_the_table() -> None:
    """Each collective is combined with each other one, and with itself for every property that must agree."""
    for name, call in CALLS.items():
        others: set[Call] = set()
        for case in cases_of(name, "mismatch"):
            others.add(case.victim_calls[case.differs_at])
        assert {other.name for other in others} == {other.name for other in CALLS.values()}
        if name != "barrier":
            assert {other.dtype for other in others if other.name == call.name} > {call.dtype}
            assert {other.numel for other in others if other.name == call.name} > {call.numel}
