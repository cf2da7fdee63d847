"""Time limits: a deadline shared by several waits, and a limit for a call without a timeout. Standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from ray_fracbackend.shown import decoded

_T = TypeVar("_T")
_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)
# How often a long wait runs the check.
_CHECK_EVERY_S = 1.0


class Deadline:
    """Point in time shared by several waits: ``left_s`` seconds from now. Messages name the ``budget_s``."""

    def __init__(self, left_s: float, budget_s: float | None = None) -> None:
        self.budget_s = left_s if budget_s is None else budget_s
        self._end = time.monotonic() + left_s

    @property
    def left_s(self) -> float:
        """Seconds left. At least a millisecond, because torch treats 0 as no limit."""
        return max(0.001, self._end - time.monotonic())


def seconds_text(seconds: float) -> str:
    """Format seconds for a log line: whole ones from 10 s on."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


@contextmanager
def ended_by(check: Callable[[], None] | None) -> Iterator[None]:
    """Run a check every second in all waits of ``bounded`` in the block; an error that it raises ends the wait."""
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def bounded(call: Callable[[], _T], timeout_s: float) -> _T:
    """Run a call that has no timeout in a thread.

    Args:
        call: The function to run.
        timeout_s: Time limit in seconds. Afterwards the call is abandoned in its daemon thread.

    Returns:
        The call's result.

    Raises:
        TimeoutError: The call did not finish in time.
        BaseException: The call, or the check of ``ended_by``, raised it; torch's UnicodeDecodeError is a RuntimeError.
    """
    outcome: list[_T | BaseException] = []
    thread = threading.Thread(target=_run, args=(call, outcome), daemon=True)
    thread.start()
    end, check = time.monotonic() + timeout_s, _CHECK.get()
    while not outcome and (left_s := end - time.monotonic()) > 0:
        thread.join(min(left_s, _CHECK_EVERY_S if check else threading.TIMEOUT_MAX))
        if check and not outcome:
            with ended_by(None):
                check()
    if not outcome:
        raise TimeoutError(f"no answer within {timeout_s:.3g} s")
    result = outcome.pop()
    if not isinstance(result, BaseException):
        return result
    try:
        raise result
    finally:
        del result


def _run(call: Callable[[], _T], outcome: list[_T | BaseException]) -> None:
    """Keep result or error of a call. No closure: an error would keep it, and with it the process group of the call."""
    try:
        with decoded():
            outcome.append(call())
    except BaseException as error:
        outcome.append(error)
