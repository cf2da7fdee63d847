"""Connection to a Ray cluster and progress bar for commands. Runs on the driver."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayTaskError

_POLL_S = 0.5
_REACH_S = 5.0
# Until a bar is drawn.
_DELAY_S = 2.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine as ``ray.init()`` does, and disconnect at the end.

    Args:
        address: As ``ray.init`` takes it; None for the running cluster that ``ray.init()`` would find, else a local one.

    Raises:
        ConnectionError: There is no cluster at the address.
    """
    try:
        _reach(address or os.environ.get("RAY_ADDRESS", ""))
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConnectionError(f"no Ray cluster at {address!r}: {str(error).strip().splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Connect to the address once, if it has a port: Ray itself retries for minutes."""
    if found := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address):
        socket.create_connection((found[1], int(found[2])), timeout=_REACH_S).close()


def wait(refs: Sequence[ray.ObjectRef[Any]], timeout_s: float, what: str) -> set[ray.ObjectRef[Any]]:
    """Wait for results, with a progress bar.

    Args:
        refs: References to wait for.
        timeout_s: How long, in seconds.
        what: Label of the bar.

    Returns:
        The references that are still open.
    """
    end, pending = time.monotonic() + timeout_s, list(refs)
    with progress(len(refs), what) as show:
        while pending and (left_s := end - time.monotonic()) > 0:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=min(_POLL_S, left_s))
            show(len(refs) - len(pending))
    return set(pending)


def root_cause(error: BaseException) -> BaseException:
    """Unwrap an error of Ray: a task's own error, that of V2's controller, or the cause of V1's."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return root_cause(error.cause)
    inner = getattr(error, "controller_failure", None) or error.__cause__
    return root_cause(inner) if inner is not None else error


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Draw a bar on standard error while the block runs.

    Args:
        total: Steps in all.
        what: Label of the bar.

    Yields:
        A function to call with the number of steps that are done.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda done: None
        return
    with tqdm(total=total, desc=what, disable=None, delay=_DELAY_S, leave=False) as bar:

        def show(done: int) -> None:
            bar.update(done - bar.n)

        yield show
