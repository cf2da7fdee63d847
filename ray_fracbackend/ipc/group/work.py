"""Work and Future of a collective, in the forms that torch's C++ callers survive. Imports torch.

``Future.set_exception`` and a result of None both crash the process inside DDP's reducer, so failures go through a
``then`` callback that raises, and the value is always a list of tensors.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch

from .._torch import Reducer, Work
from ..device.runtime import DeviceCall
from ..errors import CollectiveTimeoutError, IpcError
from .executor import DONE, Executor, Task

_hand_over = Reducer._set_forward_pass_work_handle
_handed_over: weakref.WeakKeyDictionary[Any, Work] = weakref.WeakKeyDictionary()


def keep_work_of_reducers() -> None:
    """Keep alive the Work that DDP's ``join`` passes to its reducer. May be called again.

    The reducer's C++ keeps no Python part of it, and without that its wait never ends: torch calls the base class, which
    nothing completes.
    """
    Reducer._set_forward_pass_work_handle = _hand_over_and_keep


def _hand_over_and_keep(reducer: Any, work: Work, use_static_world_size: bool) -> None:
    _hand_over(reducer, work, use_static_world_size)
    _handed_over[reducer] = work  # the one before goes only now, when the reducer no longer has it


class IpcWork(Work):  # type: ignore[misc]  # torch gives it no type
    """A collective that is over, or that runs or is issued to a device while its caller goes on.

    Args:
        task: The queued call, or `DONE`.
        executor: Runs it.
        tensors: The tensors that receive results.
        call: What the task runs, if it is on a device.
    """

    def __init__(
        self, task: Task, executor: Executor, tensors: list[torch.Tensor], call: DeviceCall | None = None
    ) -> None:
        super().__init__()
        self._task = task
        self._executor = executor
        self._tensors = tensors
        self.call = call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective is over; on a device until it is issued, then the caller's stream waits for it.

        Args:
            timeout: Bound on this wait alone; None, zero and negative mean the collective's own.

        Raises:
            IpcError: The collective failed.
            CollectiveTimeoutError: `timeout` passed first; the collective goes on.
        """
        if self._task is not DONE:
            timeout_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            if not self._executor.finish(self._task, timeout_s):
                raise CollectiveTimeoutError(f"Work.wait timed out: not done within the {timeout_s} s asked for.")
            error = self._task.error
            if error is not None:
                # What a signal handler raised in another thread is not for this one.
                raise error if isinstance(error, Exception) else IpcError(f"The collective was ended by {error!r}.")
        if self.call is not None:
            self.call.join()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective failed or is over, on a device with its work there."""
        if not self._task.is_done():
            return False
        return self.call is None or self._task.error is not None or bool(self.call.done.query())

    def is_success(self) -> bool:
        """Return whether the collective is over and nothing failed."""
        return self._task.error is None and self.is_completed()

    def exception(self) -> BaseException | None:
        """Return what the collective raised, or None."""
        return self._task.error

    def synchronize(self) -> None:
        """Do the same as ``wait()``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that receive results."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of `result()`; waiting on it raises what the collective raised."""
        call, task, tensors = self.call, self._task, self._tensors
        started: torch.futures.Future[Any] = (
            torch.futures.Future() if call is None else call.stream.runtime.new_future()
        )

        def complete() -> None:
            if call is None:
                started.set_result(tensors)
            elif task.error is not None:
                # The device may be broken, and a value without tensors does not touch it.
                started.set_result([])
            else:
                call.stream.runtime.complete(started, tensors, call.stream.stream)

        def outcome(_: torch.futures.Future[Any]) -> list[torch.Tensor]:
            if task.error is not None:
                raise task.error if isinstance(task.error, Exception) else IpcError(repr(task.error))
            return tensors

        future: torch.futures.Future[list[torch.Tensor]] = started.then(outcome)
        task.when_done(complete)
        return future


class ReceiveWork(Work):  # type: ignore[misc]  # torch gives it no type
    """A tensor of an accelerator that is received on the host first.

    Args:
        work: Gloo's, of the tensor on the host.
        host: That tensor.
        tensor: Where the data belongs.
    """

    def __init__(self, work: Any, host: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._host: torch.Tensor | None = host
        self._tensor = tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the data has come, then copy it on the caller's stream. May be called again.

        Args:
            timeout: Bound on this wait alone; None, zero and negative mean the group's own.

        Raises:
            RuntimeError: The sender has gone, or the time is over.
        """
        self._work.wait(timeout) if timeout is not None and timeout > timedelta(0) else self._work.wait()
        host, self._host = self._host, None
        if host is not None:
            self._tensor.data.copy_(host)
        return True

    def is_completed(self) -> bool:
        """Return whether the data is in the tensor: a receive ends in ``wait()``."""
        return self._host is None

    def is_success(self) -> bool:
        """Return the same: a receive that failed does not complete."""
        return self._host is None

    def synchronize(self) -> None:
        """Do the same as ``wait()``."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that sent."""
        return int(self._work._source_rank())

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """Return the tensor that receives the data."""
        return [self._tensor]
