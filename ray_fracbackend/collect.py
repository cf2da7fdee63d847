"""Bounded waits for the results of all workers; errors name ranks that hang or die. Runs on the driver or controller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayActorError, RayError, RayTaskError
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError

from ray_fracbackend._ray import WorkerAddress, restarts_lost_workers
from ray_fracbackend.decide.nccl import cause_of
from ray_fracbackend.decide.worker_info import ranks_text
from ray_fracbackend.errors import (
    BackendUnavailableError,
    FracBackendError,
    GroupFormationError,
    MissingDeviceError,
    OutOfMemoryError,
    RendezvousError,
    SharedDeviceError,
    StartTimeoutError,
    UnreachableMasterError,
    VerificationError,
    WorkerDiedError,
)
from ray_fracbackend.timeouts import Deadline

# How often a running wait looks for failures, and how long it waits after the first one for others.
_POLL_S = 1.0
_GRACE_S = 3.0
_NUM_NAMED = 4
# The most specific failure names the error: where NCCL refused a rank, its peers fail the verification.
_ORDER = (
    SharedDeviceError,
    MissingDeviceError,
    VerificationError,
    UnreachableMasterError,
    GroupFormationError,
    RendezvousError,
    FracBackendError,
)


_REFUSALS = (MissingDeviceError, BackendUnavailableError)
# Ray's memory monitor ends a worker with an error of its own.
_DEATHS = (RayActorError, NodeDiedError, RayOutOfMemoryError)


class LostWorkerError(WorkerDiedError, RayActorError):  # type: ignore[misc]
    """WorkerDiedError where Ray Train restarts the workers on a RayActorError of a start: with the V2 engine."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        RayActorError.__init__(self, error_msg=message)
        WorkerDiedError.__init__(self, message, ranks=ranks)


def gather(
    refs: Sequence[ray.ObjectRef[Any]],
    addresses: Sequence[WorkerAddress],
    deadline: Deadline,
    step: str,
    slack_s: float = 0,
) -> list[Any]:
    """Wait for the results of one call on every worker.

    Args:
        refs: One reference a rank.
        addresses: Node and process of each rank.
        deadline: When to stop waiting.
        step: The current step, for error messages.
        slack_s: Seconds past the deadline for workers that keep the same deadline themselves, so that their own errors
            arrive first.

    Returns:
        The results by rank.

    Raises:
        WorkerDiedError: A worker process ended.
        StartTimeoutError: Ranks did not answer in time.
        FracBackendError: A worker raised it; with rank and node.
    """
    wait = _Wait(refs, addresses, deadline, step)
    wait.run(slack_s)
    return wait.results


def collect(refs: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> dict[int, Any]:
    """Wait for calls, and return the results of those that succeed in time by their index."""
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s, fetch_local=True) if refs else ([], [])
    index_of = {ref: index for index, ref in enumerate(refs)}
    results = {}
    for ref in done:
        value, error = _get(ref)  # an error of any kind: the worker may be gone
        if error is None:
            results[index_of[ref]] = value
    return results


class _Wait:
    def __init__(
        self, refs: Sequence[ray.ObjectRef[Any]], addresses: Sequence[WorkerAddress], deadline: Deadline, step: str
    ) -> None:
        self._pending = list(refs)
        self._rank_of = {ref: rank for rank, ref in enumerate(refs)}
        self._addresses = addresses
        self._deadline = deadline
        self._step = step
        self._failures: dict[int, BaseException] = {}
        self._overdue: list[int] = []
        self.results: list[Any] = [None] * len(refs)

    def run(self, slack_s: float) -> None:
        left_s = self._deadline.left_s + slack_s
        end = time.monotonic() + left_s
        # A failure at the deadline ends the wait after the grace, which may be before the end of the slack.
        due = end - max(0.0, slack_s - _GRACE_S)
        while self._pending and left_s > 0:
            done, self._pending = ray.wait(
                self._pending, num_returns=len(self._pending), timeout=min(left_s, _POLL_S), fetch_local=True
            )
            had_failures = bool(self._failures)
            self._collect(done)
            if self._failures and not had_failures:
                end = min(end, time.monotonic() + _GRACE_S)
            left_s = end - time.monotonic()
        # Cut off in the grace after an earlier failure, ranks without an answer are waiting for the failed one.
        self._overdue = [self._rank_of[ref] for ref in self._pending] if time.monotonic() >= due else []
        if self._failures or self._pending:
            raise self._error() from next(iter(self._failures.values()), None)

    def _collect(self, done: list[ray.ObjectRef[Any]]) -> None:
        values, failed = _get(done)
        if failed is None:
            for ref, value in zip(done, values, strict=True):
                self.results[self._rank_of[ref]] = value
            return
        for ref in done:  # at least one failed
            self.results[self._rank_of[ref]], error = _get(ref)
            if error is not None:
                self._failures[self._rank_of[ref]] = _cause(error)

    def _error(self) -> FracBackendError:
        silent = self._overdue
        dead = [rank for rank, error in self._failures.items() if isinstance(error, _DEATHS)]
        if dead:
            first = cause_of(self._failures[dead[0]])
            return WorkerDiedError(
                f"{self._where(dead)} died during start-up ({self._step}): {first} Look for it in that node's logs; the "
                "usual causes are too little memory and a preempted node.",
                ranks=dead,
            )
        starved = [rank for rank, error in self._failures.items() if _is_out_of_memory(error)]
        if starved:
            # What torch adds on its own allocator is not about a start.
            first = cause_of(self._failures[starved[0]]).partition(" Including non-PyTorch memory")[0].rstrip(".")
            return OutOfMemoryError(
                f"{self._where(starved)} ran out of device memory during start-up ({self._step}): {first}. Free the device of "
                "other processes, or ask for a larger GPU fraction so that fewer workers share it.",
                ranks=starved,
            )
        # Whoever has no device ends, and its peers fail in whatever they do then.
        refused: dict[int, BaseException] = {
            rank: error for rank, error in self._failures.items() if isinstance(error, _REFUSALS)
        }
        silent, failures = ([], refused) if refused else (silent, self._failures)
        parts = []
        if silent:
            parts.append(
                f"{self._where(silent)} did not answer ({self._step}, start_timeout_s={self._deadline.budget_s:g})"
            )
        ranks_of: dict[str, list[int]] = {}
        for rank, error in failures.items():
            ranks_of.setdefault(_text(error), []).append(rank)
        parts += [f"{self._where(ranks)}: {text}" for text, ranks in list(ranks_of.items())[:_NUM_NAMED]]
        if not self._failures:
            advice = "Look at those workers' logs and nodes, or raise start_timeout_s if they are only slow."
            return StartTimeoutError(f"{parts[0]}. {advice}", ranks=silent)
        message = "; ".join(parts)
        for kind in _ORDER:
            for error in failures.values():
                if isinstance(error, kind):
                    return type(error)(message, ranks=silent or _blamed(failures))
        return RendezvousError(f"{self._step} failed: {message}", ranks=silent or self._failures)

    def _where(self, ranks: list[int]) -> str:
        if len(ranks) > _NUM_NAMED:
            nodes = sorted({self._addresses[rank].node_ip for rank in ranks})
            return f"{ranks_text(ranks)} (nodes {', '.join(nodes[:_NUM_NAMED])})"
        return ", ".join(self._addresses[rank].text for rank in ranks)


def _get(refs: Any) -> tuple[Any, Exception | None]:
    """Return the value or the error of ``ray.get``, the error without its traceback: its frames would keep references."""
    try:
        return ray.get(refs), None
    except Exception as error:
        return None, error.with_traceback(None)


def _cause(error: BaseException) -> BaseException:
    """Return the worker's own error, without Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def _is_out_of_memory(error: BaseException) -> bool:
    """Detect torch's error by its class name, without importing torch; Ray's error of that name is about host memory."""
    return type(error).__name__ == "OutOfMemoryError" and not isinstance(error, RayError)


def _text(error: BaseException) -> str:
    if isinstance(error, FracBackendError):
        return str(error)
    text = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, ModuleNotFoundError) and "ray_fracbackend" in str(error):
        text += ". Install ray_fracbackend on every node, or send its folder along: runtime_env={'py_modules': [PATH]}"
    return text


def _blamed(failures: dict[int, BaseException]) -> list[int]:
    """Return the ranks that the workers' errors name, else the failing workers."""
    blamed = {rank for error in failures.values() if isinstance(error, FracBackendError) for rank in error.ranks}
    return sorted(blamed or failures)


def raise_for_engine(error: BaseException, worker_group: Any) -> None:
    """Raise a dead worker's error as the class on which the group's engine of Ray Train restarts the workers, if it has one."""
    if isinstance(error, WorkerDiedError) and restarts_lost_workers(worker_group):
        raise LostWorkerError(str(error), ranks=error.ranks) from error
