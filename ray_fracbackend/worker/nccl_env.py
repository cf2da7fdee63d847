"""Warn about NCCL's variables that a train function sets: NCCL has read them in the start. Runs on the worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ray_fracbackend.log import logger
from ray_fracbackend.worker.state import STATE


def nccl_env() -> dict[str, str]:
    """Return NCCL's variables of this process."""
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


@contextmanager
def late_nccl_env_logged(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter another context, and log the variables of NCCL that changed since the start created its communicator.

    Args:
        context: Creates the context that Ray Train would otherwise enter.
    """
    try:
        with context():
            yield
    finally:
        if STATE.nccl_env is not None and (late := sorted(dict(STATE.nccl_env.items() ^ nccl_env().items()))):
            logger.warning(
                "the train function changed %s after the start had created NCCL's communicator: set them before, with "
                "runtime_env={'env_vars': {...}} in ray.init",
                ", ".join(late),
            )
