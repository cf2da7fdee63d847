"""Search for the fault of a failed start: every rank that can answer tests its device and its links. Runs on the driver."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ray_fracbackend._ray import WorkerGroup
from ray_fracbackend.decide.error_texts import is_lost_connection
from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.decide.worker_info import WorkerAddress
from ray_fracbackend.errors import FracBackendError, GroupFormationError, VerificationError
from ray_fracbackend.log import logger
from ray_fracbackend.start.collect import collect
from ray_fracbackend.start.failure.merge import PEER_LOST, death_error
from ray_fracbackend.start.isolation.faults import Fault, diagnose, link_targets
from ray_fracbackend.start.isolation.rank_tests import open_listener, run_tests
from ray_fracbackend.timeouts import Deadline, seconds_text

# The search takes at most this part of the start's time limit, and at most _MAX_S.
_PART, _MAX_S = 0.25, 15.0
# Parts of the search's time: until the listeners are open, and for the links. The rest is for devices.
_OPENING, _LINKS = 0.25, 0.4
_NUM_FAULTS = 4

# Calls a function on ranks with these arguments. Returns answers and errors by rank, of those that come in time.
Call = Callable[
    [Callable[..., Any], Mapping[int, tuple[Any, ...]], float], tuple[dict[int, Any], dict[int, BaseException]]
]


def with_faults(
    error: FracBackendError,
    worker_group: WorkerGroup,
    plans: Sequence[WorkerPlan],
    addresses: Sequence[WorkerAddress],
    start_timeout_s: float,
    busy: Collection[int] = (),
) -> FracBackendError:
    """Add the ranks, nodes and links at fault to the error of a start in which no rank has said what is wrong.

    Args:
        error: The error of the start. It is returned unchanged if a rank has said what is wrong, if it names a busy rank, or
            if no fault is found.
        worker_group: Workers whose start has failed.
        plans: Plan of each rank, by rank.
        addresses: Node and process of each rank.
        start_timeout_s: Time limit of the start in seconds.
        busy: Ranks that are still in the failed start. They run no tests: a call to them waits for it.

    Returns:
        WorkerDiedError if a worker turns out to be dead, else the error.
    """
    if not isinstance(error, (GroupFormationError, VerificationError)) or not {*error.ranks}.isdisjoint(busy):
        return error
    lost_a_peer = isinstance(error, VerificationError) and error.kind in PEER_LOST
    if not lost_a_peer and error.kind != "stalled" and not is_lost_connection(error.cause):
        return error

    def call(function: Callable[..., Any], arguments: Mapping[int, tuple[Any, ...]], timeout_s: float) -> Any:
        refs = [worker_group.execute_single_async(rank, function, *each) for rank, each in arguments.items()]
        outcomes = dict(zip(arguments, collect(refs, timeout_s), strict=True))
        answers = {rank: outcome[0] for rank, outcome in outcomes.items() if outcome and outcome[1] is None}
        return answers, {rank: outcome[1] for rank, outcome in outcomes.items() if outcome and outcome[1]}

    search_s = min(_MAX_S, start_timeout_s * _PART)
    logger.info("the start failed: searching for the rank, device or link at fault, up to %s s", seconds_text(search_s))
    faults, failures = find_faults(
        call, {plan.rank: plan for plan in plans if plan.rank not in busy}, addresses, search_s
    )
    if died := death_error(failures, {address.rank: address for address in addresses}, error.step):
        return died
    if not faults:
        return error
    error.faults = "; ".join(fault.text for fault in faults[:_NUM_FAULTS])
    error.ranks = tuple(sorted({*error.ranks, *(rank for fault in faults for rank in fault.ranks)}))
    return error


def find_faults(
    call: Call, plans: Mapping[int, WorkerPlan], addresses: Sequence[WorkerAddress], search_s: float
) -> tuple[list[Fault], dict[int, BaseException]]:
    """Find the fault of a failed start, in two calls of each rank.

    Args:
        call: Calls a function on ranks.
        plans: Plan of each rank that is not busy, by rank.
        addresses: Node and process of each rank.
        search_s: Time limit in seconds.

    Returns:
        The faults, and the errors of ranks whose call failed, which is no fault.
    """
    deadline = Deadline(search_s)
    word = secrets.token_bytes(16)
    arguments = {rank: (plan.master_addr, word, search_s) for rank, plan in plans.items()}
    listeners, failures = call(open_listener, arguments, search_s * _OPENING)
    peers = link_targets(addresses)
    tests = {
        rank: (
            plans[rank].device,
            {peer: listeners[peer] for peer in peers[rank] if peer in listeners},
            word,
            search_s * _LINKS,
        )
        for rank in listeners
    }
    findings, failures_of_tests = call(run_tests, tests, deadline.left_s)
    failures |= failures_of_tests
    silent = plans.keys() - findings.keys() - failures.keys()
    return diagnose(findings, silent, addresses), failures
