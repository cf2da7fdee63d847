"""Report workers that a script waits for because the cluster cannot place them. Runs on the driver.

Ray Train waits for resources without a limit, because an autoscaler may add nodes. It does not say what to request instead.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.util.placement_group import placement_group_table

from ray_fracbackend.cli.declared import UsedRay
from ray_fracbackend.cli.workers.shortage import bundles_of, cluster_too_small, request_text, resources_in_use
from ray_fracbackend.errors import InsufficientResourcesError

_POLL_S = 2.0
# Reading the table of many placement groups may be slow: the pause between two reads is this many times the time of a read.
_IDLE = 20
# Other jobs often end within this time.
_IN_USE_S = 30.0
# Time between the first line and the second; it doubles after each line.
_REPEAT_S = 120.0
# V2 creates a new placement group each minute.
_GONE_S = 60.0
# Bundles and placement strategy.
_Request = tuple[Sequence[Mapping[str, float]], str]


@dataclass
class _Wait:
    """A request that Ray has not placed.

    Attributes:
        since: When it was first seen, in seconds of a monotonic clock.
        seen: When it was last seen.
        due: When the next line about it is due.
        pause_s: Seconds from that line to the next.
    """

    since: float
    seen: float
    due: float
    pause_s: float = _REPEAT_S


class Waits:
    """Requests that Ray has not placed, and the times of the log lines about them.

    Args:
        say: Called with a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waits: dict[str, _Wait] = {}
        self._lock = threading.Lock()

    def check(self, trainer: TorchTrainer, used: UsedRay) -> None:
        """Check that Ray can place a trainer's workers; start Ray as the trainer would.

        Nodes may join a cluster that was already running, so in this case it only prints what is missing.

        Args:
            trainer: The trainer whose ``fit()`` begins.
            used: The Ray of this process.

        Raises:
            InsufficientResourcesError: This process started Ray, which cannot place all workers.
        """
        request = _request_of(trainer)
        if request is None:
            return
        if not ray.is_initialized():
            ray.init()
        if not used.is_own:
            with suppress(Exception):  # only a log line; the run continues without it
                self.look(time.monotonic(), [request], at_once=True)
        elif reason := cluster_too_small(*request, is_own=True):
            raise InsufficientResourcesError(f"Ray cannot place {request_text(*request)}: {reason}.")

    def look(self, now: float, pending: Iterable[_Request], *, at_once: bool = False) -> None:
        """Print the lines that are due.

        Args:
            now: Seconds of a monotonic clock.
            pending: Requests that are not placed.
            at_once: Also print a line about a new request, although Ray may place it soon.
        """
        with self._lock:
            for bundles, strategy in pending:
                wanted = request_text(bundles, strategy)
                wait = self._waits.setdefault(wanted, _Wait(now, now, now))
                wait.seen = now
                if now < wait.due or (now == wait.since and not at_once):
                    continue
                too_small = cluster_too_small(bundles, strategy)
                if too_small is None and now < wait.since + _IN_USE_S:
                    continue
                wait.due, wait.pause_s = now + wait.pause_s, 2 * wait.pause_s
                self._say(_text(wanted, too_small, bundles))
            self._waits = {wanted: wait for wanted, wait in self._waits.items() if now - wait.seen < _GONE_S}


def _request_of(trainer: TorchTrainer) -> _Request | None:
    """Return the request of a trainer's run; None if there is nothing to place."""
    scaling_config = copy.copy(trainer.scaling_config)
    if isinstance(scaling_config.num_workers, tuple):  # elastic: it starts with the smallest number
        scaling_config.num_workers = scaling_config.num_workers[0]
    # V2 with 0 workers trains in this process. V1 raises its own errors and allows search spaces.
    if not isinstance(scaling_config.num_workers, int) or scaling_config.num_workers < 1:
        return None
    bundles, strategy = bundles_of(scaling_config), scaling_config.placement_strategy
    return (bundles, strategy) if bundles and isinstance(strategy, str) else None


def _text(wanted: str, too_small: str | None, bundles: Sequence[Mapping[str, float]]) -> str:
    goes_on = "It continues when such nodes join, as from an autoscaler" if too_small else "It continues then"
    return f"Ray waits to place {wanted}: {too_small or resources_in_use(bundles)}. {goes_on}; Ctrl-C ends it"


@contextmanager
def watching(waits: Waits) -> Iterator[None]:
    """Check in a thread, while the block runs, for requests of this process's job, such as the trials of a Tune function."""
    ended = threading.Event()
    threading.Thread(target=_watch, args=(waits, ended), daemon=True, name="ray_fracbackend waits").start()
    try:
        yield
    finally:
        ended.set()


def _watch(waits: Waits, ended: threading.Event) -> None:
    pause_s = _POLL_S
    while not ended.wait(pause_s):
        started = time.monotonic()
        # Ray may be shut down meanwhile, and a Ray client has no such table.
        with suppress(Exception):
            if ray.is_initialized():
                waits.look(started, _pending())
        pause_s = max(_POLL_S, _IDLE * (time.monotonic() - started))


def _pending() -> list[_Request]:
    job = ray.get_runtime_context().get_job_id()
    table: Mapping[str, Any] = placement_group_table()
    return [
        ([group["bundles"][index] for index in sorted(group["bundles"])], group["strategy"])
        for name, group in table.items()
        # The id of a placement group ends with that of its job.
        if group["state"] == "PENDING" and name.endswith(job)
    ]
