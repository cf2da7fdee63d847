"""Bounded waits for the results of all workers; errors name ranks that hang or die. Runs on the driver or controller.

A long wait logs the ranks that have not answered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from ray_fracbackend.decide.worker_info import WorkerAddress, named
from ray_fracbackend.log import logger
from ray_fracbackend.timeouts import Deadline, seconds_text

# How often a wait checks for failures, and how long it waits for the others after the first one, which they notice within a second.
_POLL_S = 1.0
_GRACE_S = 3.0
# When a wait is logged first; then each time it has become twice as long.
_LOG_AFTER_S = 10.0


def gather(
    refs: Sequence[ray.ObjectRef[Any]],
    addresses: Sequence[WorkerAddress],
    deadline: Deadline,
    step: str,
    slack_s: float = 0,
    since_first_s: float | None = None,
) -> list[Any]:
    """Wait for the results of one call on every worker.

    Args:
        refs: One reference per worker.
        addresses: Rank, node and process of each of these workers, in the same order.
        deadline: When to stop waiting.
        step: The current step, for error messages and for the lines about a long wait.
        slack_s: Seconds to wait past the deadline for workers that have the same deadline, to receive their own errors
            first.
        since_first_s: Time limit in seconds from the first answer on, None for no separate limit.

    Returns:
        The results, in the order of the references.

    Raises:
        WorkerDiedError: A worker process ended.
        StartTimeoutError: Ranks did not answer in time.
        FracBackendError: A worker raised it; it has the rank and the node.
    """
    address_of = dict(zip(refs, addresses, strict=True))
    results: dict[Any, Any] = {}
    failures: dict[int, BaseException] = {}
    pending = list(refs)
    left_s, budget_s = deadline.left_s + slack_s, since_first_s or deadline.budget_s
    end = time.monotonic() + left_s
    started, log_s = time.monotonic(), _LOG_AFTER_S
    # After a failure at the deadline, the wait ends with the grace period, which may be shorter than the slack.
    due = end - max(0.0, slack_s - _GRACE_S)
    while pending and left_s > 0:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=min(left_s, _POLL_S), fetch_local=True)
        had_failures = bool(failures)
        for ref, (value, error) in zip(done, _answers(done), strict=True):
            if error is None:
                results[ref] = value
            else:
                failures[address_of[ref].rank] = error
        if done and since_first_s is not None:
            due = end = min(end, time.monotonic() + since_first_s)
            since_first_s = None
        if failures and not had_failures:
            end = min(end, time.monotonic() + _GRACE_S)
        left_s = end - time.monotonic()
        waited_s = time.monotonic() - started
        if pending and not failures and waited_s >= log_s:
            log_s = 2 * waited_s
            silent = {address_of[ref].rank: address_of[ref] for ref in pending}
            logger.info(
                "%s: waiting for %s, %s s so far, up to %s s more",
                step,
                named(list(silent), silent),
                seconds_text(waited_s),
                seconds_text(max(0.0, left_s)),
            )
    if failures or pending:
        from ray_fracbackend.start.failure.merge import merged  # not on the good path

        # If the grace period of an earlier failure ended the wait, ranks without an answer wait for the failed rank.
        absent = [address_of[ref].rank for ref in pending] if time.monotonic() >= due else []
        known = {address.rank: address for address in addresses}
        raise merged(failures, absent, known, step, budget_s) from next(iter(failures.values()), None)
    return [results[ref] for ref in refs]


def collect(refs: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> list[tuple[Any, BaseException | None] | None]:
    """Wait for calls, and return value and error of each in the order of the references; None if it did not end in time."""
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s, fetch_local=True) if refs else ([], [])
    outcomes = dict(zip(done, _answers(done), strict=True))
    return [outcomes.get(ref) for ref in refs]


def _answers(refs: list[ray.ObjectRef[Any]]) -> list[tuple[Any, BaseException | None]]:
    """Return value and error of each call."""
    values, error = _answer(refs)  # one call if none has failed
    return [(value, None) for value in values] if error is None else [_answer(ref) for ref in refs]


def _answer(refs: Any) -> tuple[Any, BaseException | None]:
    """Return the value or the error of ``ray.get``: the worker's own error, without Ray's wrapping.

    The error has no traceback, and no other error is being handled: the frames of both would keep references.
    """
    try:
        return ray.get(refs), None
    except Exception as error:
        own = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
        return None, own.with_traceback(None)
