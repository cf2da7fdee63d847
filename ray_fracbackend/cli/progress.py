"""Wait for results of Ray with a time limit, and find the cause of an error of Ray. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray


def wait(refs: Sequence[ray.ObjectRef[Any]], timeout_s: float, what: str) -> set[ray.ObjectRef[Any]]:
    """Wait for results.

    Args:
        refs: References to wait for.
        timeout_s: How long, in seconds.
        what: What the caller waits for; not shown.

    Returns:
        The references that are still open.
    """
    import ray

    _, pending = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    return set(pending)


def root_cause(error: BaseException) -> BaseException:
    """Unwrap an error of Ray: a task's own error, that of V2's controller, or the cause of V1's."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError) and error.cause is not None:
        return root_cause(error.cause)
    inner = getattr(error, "controller_failure", None) or error.__cause__
    return root_cause(inner) if inner is not None else error
