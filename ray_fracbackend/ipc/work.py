"""Work and Future of a collective, in the forms that torch's C++ callers survive. Imports torch.

``Future.set_exception`` and a result of None both crash the process inside DDP's reducer, so failures go through a
``then`` callback that raises, and the value is always a list of tensors.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from .errors import CollectiveTimeoutError, IpcError
from .executor import Executor, Task
from .torch_compat import Work


def completed_future(tensors: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
    """A future that already holds `tensors`."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return future


class CompletedWork(Work):  # type: ignore[misc]  # torch gives it no type
    """A collective that was over before its call returned.

    Args:
        tensors: Value of the future: the tensors that received results.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> BaseException | None:
        """None."""
        return None

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def result(self) -> list[torch.Tensor]:
        """The tensors that received results."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A completed future of `result()`."""
        return completed_future(self._tensors)


class PendingWork(Work):  # type: ignore[misc]  # torch gives it no type
    """A collective that runs behind its caller's back.

    Args:
        task: The queued call.
        executor: Runs it.
        tensors: The tensors that receive results.
    """

    def __init__(self, task: Task, executor: Executor, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._task = task
        self._executor = executor
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective is over.

        Args:
            timeout: Bound on this wait alone; None, zero and negative mean the collective's own.

        Raises:
            IpcError: The collective failed.
            CollectiveTimeoutError: `timeout` passed first; the collective goes on.
        """
        if timeout is not None and timeout > timedelta(0):
            if not self._task.wait(timeout.total_seconds()):
                raise CollectiveTimeoutError(f"Work.wait: not done within the {timeout.total_seconds()} s asked for.")
        else:
            self._executor.finish(self._task)
        if self._task.error is not None:
            raise self._task.error
        return True

    def is_completed(self) -> bool:
        """Whether the collective is over, well or badly."""
        return self._task.is_done()

    def is_success(self) -> bool:
        """Whether the collective is over and went well."""
        return self._task.is_done() and self._task.error is None

    def exception(self) -> BaseException | None:
        """What the collective raised, or None."""
        return self._task.error

    def synchronize(self) -> None:
        """Same as ``wait()``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that receive results."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of `result()`; waiting on it raises what the collective raised."""
        started: torch.futures.Future[Any] = torch.futures.Future()
        task, tensors = self._task, self._tensors

        def outcome(_: torch.futures.Future[Any]) -> list[torch.Tensor]:
            if task.error is not None:
                raise task.error if isinstance(task.error, Exception) else IpcError(repr(task.error))
            return tensors

        future: torch.futures.Future[list[torch.Tensor]] = started.then(outcome)
        task.when_done(lambda: started.set_result(tensors))
        return future
