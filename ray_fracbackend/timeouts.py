"""Time limits: a deadline that several waits share, and a bound on a call that has none. Standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Deadline:
    """A point in time that several waits share.

    Args:
        budget_s: Seconds from now.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._end = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds left; a millisecond when it is over, as torch takes 0 for no limit."""
        return max(0.001, self._end - time.monotonic())

    def share(self, part: float) -> Deadline:
        """Return the deadline of what may take this part of the time left; the budget, for messages, stays that of the whole."""
        shared = Deadline(self.left_s * part)
        shared.budget_s = self.budget_s
        return shared


def bounded(call: Callable[[], _T], timeout_s: float) -> _T:
    """Run a call that cannot be given a timeout, in a thread.

    Args:
        call: What to run.
        timeout_s: Bound in seconds. Past it the call is left behind in its daemon thread.

    Returns:
        The call's result.

    Raises:
        TimeoutError: The call did not end in time.
        BaseException: What the call raised.
    """
    outcome: list[_T | BaseException] = []
    calls = [call]  # taken out before it runs, so that no error holds it: a cleared frame still has its closure

    def run() -> None:
        try:
            outcome.append(calls.pop()())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if not outcome:
        raise TimeoutError(f"no answer within {timeout_s:.3g} s")
    result = outcome.pop()
    if not isinstance(result, BaseException):
        return result
    try:
        raise result
    finally:
        del result
