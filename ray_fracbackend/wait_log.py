"""Log which ranks have not answered while a wait takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count

from ray_fracbackend.decide.worker_info import WorkerAddress, named
from ray_fracbackend.log import logger
from ray_fracbackend.timeouts import seconds_text

# When a wait is logged, in seconds from its beginning, and the interval after that.
_LOG_AT_S = (10.0, 30.0, 90.0)
_LOG_EVERY_S = 60.0


class WaitLog:
    """The log lines of one wait that begins now.

    Args:
        step: Current step of the workers, as in error messages.
    """

    def __init__(self, step: str) -> None:
        self._step = step
        self._started = time.monotonic()
        self._times = log_times()
        self._next_s = next(self._times)

    def update(self, silent: Sequence[WorkerAddress], left_s: float) -> None:
        """Log the workers without an answer if a line is due.

        Args:
            silent: These workers.
            left_s: Seconds until the wait ends.
        """
        waited_s = time.monotonic() - self._started
        if waited_s < self._next_s:
            return
        self._next_s = next(self._times)
        logger.info(
            "%s: waiting for %s, %s s so far, up to %s s more",
            self._step,
            named([address.rank for address in silent], {address.rank: address for address in silent}),
            seconds_text(waited_s),
            seconds_text(max(0.0, left_s)),
        )


def log_times() -> Iterator[float]:
    """Yield when to log, in seconds from the beginning of a wait."""
    yield from _LOG_AT_S
    yield from count(_LOG_AT_S[-1] + _LOG_EVERY_S, _LOG_EVERY_S)
