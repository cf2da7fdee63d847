"""What a script waits for: workers that the cluster cannot place. Runs on the driver.

Ray Train waits for resources without a limit, and rightly: an autoscaler may add nodes. It does not say what would help.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.util.placement_group import placement_group_table

from ray_fracbackend import _ray
from ray_fracbackend.cli.workers.shortage import bundles_of, cluster_too_small, request_text, resources_in_use
from ray_fracbackend.errors import InsufficientResourcesError

_POLL_S = 2.0
# A table of many placement groups may be slow: the waits between two looks at it are so many times as long as a look.
_IDLE = 20
# Other jobs often end within this time.
_IN_USE_S = 30.0
# Between the first line and the second; then twice as long each time.
_REPEAT_S = 120.0
# V2 makes a new placement group each minute.
_GONE_S = 30.0


def check_places(trainer: TorchTrainer) -> None:
    """Check that a Ray which this process started has places for a trainer's workers; start it as the trainer would.

    Args:
        trainer: That is about to fit.

    Raises:
        InsufficientResourcesError: It does not, and no node is going to join it.
    """
    scaling_config = trainer.scaling_config
    num_workers = scaling_config.num_workers
    least = num_workers[0] if isinstance(num_workers, tuple) else num_workers  # a tuple: elastic
    if not isinstance(least, int) or least < 1:  # V2 trains in this process, or V1 has an error of its own
        return
    if not ray.is_initialized():
        ray.init()
    if not _ray.started_ray():
        return
    smallest = copy.copy(scaling_config)
    smallest.num_workers = least
    bundles, strategy = bundles_of(smallest), scaling_config.placement_strategy
    if bundles and isinstance(strategy, str) and (reason := cluster_too_small(bundles, strategy, is_own=True)):
        raise InsufficientResourcesError(f"Ray cannot place {request_text(bundles, strategy)}: {reason}.")


@dataclass
class _Wait:
    """A request that Ray has not placed.

    Attributes:
        since: When it was first seen, by time.monotonic().
        seen: When it was last seen.
        due: When the next line about it is due.
        pause_s: Seconds from that line to the next.
    """

    since: float
    seen: float
    due: float
    pause_s: float = _REPEAT_S


class Waits:
    """Requests that Ray has not placed, and when a line about one is due.

    Args:
        say: Called with a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waits: dict[str, _Wait] = {}

    def look(self, now: float, pending: Sequence[tuple[Sequence[Mapping[str, float]], str]]) -> None:
        """Say what is due.

        Args:
            now: Seconds of a monotonic clock.
            pending: Bundles and strategy of each placement group that is not placed.
        """
        for bundles, strategy in pending:
            wanted = request_text(bundles, strategy)
            wait = self._waits.setdefault(wanted, _Wait(now, now, now))
            wait.seen = now
            # One that was made just now is seldom placed yet.
            if now == wait.since or now < wait.due:
                continue
            too_small = cluster_too_small(bundles, strategy)
            if too_small is None and now < wait.since + _IN_USE_S:
                continue
            wait.due, wait.pause_s = now + wait.pause_s, 2 * wait.pause_s
            goes_on = "It goes on when nodes with the resources join" if too_small else "It goes on then"
            self._say(
                f"Ray waits to place {wanted}: {too_small or resources_in_use(bundles)}. {goes_on}; Ctrl-C ends it"
            )
        self._waits = {wanted: wait for wanted, wait in self._waits.items() if now - wait.seen < _GONE_S}


@contextmanager
def saying_waits(say: Callable[[str], None]) -> Iterator[None]:
    """Say what this process's job waits for, from a thread, while the block runs.

    Args:
        say: Called with a line, at first within seconds and then rarely.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(Waits(say), ended), daemon=True, name="ray_fracbackend waits")
    thread.start()
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


def _pending() -> list[tuple[list[Mapping[str, float]], str]]:
    job = ray.get_runtime_context().get_job_id()
    table: Mapping[str, Any] = placement_group_table()
    return [
        ([group["bundles"][index] for index in sorted(group["bundles"])], group["strategy"])
        for name, group in table.items()
        # The id of a placement group ends with that of its job.
        if group["state"] == "PENDING" and name.endswith(job)
    ]
