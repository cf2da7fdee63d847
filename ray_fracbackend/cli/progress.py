"""Waits with a progress bar on standard error, and the cause of an error of Ray. Runs on the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray

_POLL_S = 0.5
# Time before a bar is drawn.
_DELAY_S = 2.0


def wait(refs: Sequence[ray.ObjectRef[Any]], timeout_s: float, what: str) -> set[ray.ObjectRef[Any]]:
    """Wait for results, with a progress bar.

    Args:
        refs: References to wait for.
        timeout_s: How long, in seconds.
        what: Label of the bar.

    Returns:
        The references that are still open.
    """
    import ray

    end, pending = time.monotonic() + timeout_s, list(refs)
    with progress(len(refs), what) as show:
        while pending and (left_s := end - time.monotonic()) > 0:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=min(_POLL_S, left_s))
            show(len(refs) - len(pending))
    return set(pending)


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


def root_cause(error: BaseException) -> BaseException:
    """Unwrap an error of Ray: a task's own error, that of V2's controller, or the cause of V1's."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError) and error.cause is not None:
        return root_cause(error.cause)
    inner = getattr(error, "controller_failure", None) or error.__cause__
    return root_cause(inner) if inner is not None else error
