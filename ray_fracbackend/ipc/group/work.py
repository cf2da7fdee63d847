"""Work and Future of a collective, in forms that do not crash torch's C++ callers. Imports torch.

``Future.set_exception`` and a result of None both crash the process inside DDP's reducer. Therefore a failure is raised
in a ``then`` callback, and the value is always a list of tensors.
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

    The reducer's C++ does not keep the Python part of the Work. Without it the reducer waits for ever, in ``wait`` of
    the C++ base class, which is never completed.
    """
    Reducer._set_forward_pass_work_handle = _hand_over_and_keep


def _hand_over_and_keep(reducer: Any, work: Work, use_static_world_size: bool) -> None:
    _hand_over(reducer, work, use_static_world_size)
    if isinstance(work, IpcWork):
        _handed_over[reducer] = work  # only now drop the previous Work: the reducer no longer has it


class IpcWork(Work):  # type: ignore[misc]  # torch gives it no type
    """Work of a collective that is queued, has finished, or has been issued to a device.

    Args:
        task: The queued call, or `DONE`.
        executor: Runs the task.
        tensors: The tensors that receive results.
        call: The device call that the task runs; None on the host.

    Attributes:
        tensors: See above.
        call: See above.
    """

    def __init__(
        self, task: Task, executor: Executor, tensors: list[torch.Tensor], call: DeviceCall | None = None
    ) -> None:
        super().__init__()
        self._task = task
        self._executor = executor
        self.tensors = tensors
        self.call = call

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective has finished; on a device, until it is issued and the caller's stream waits for it.

        Args:
            timeout: Limit of this wait only; None, zero and negative mean the timeout of the collective.

        Raises:
            IpcError: The collective failed.
            CollectiveTimeoutError: The collective did not finish within `timeout`; it continues to run.
        """
        if self._task is not DONE:
            timeout_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            if not self._executor.finish(self._task, timeout_s):
                raise CollectiveTimeoutError(f"Work.wait timed out: the collective is not done within {timeout_s} s.")
            error = self._task.error
            if error is not None:
                # Do not re-raise here what a signal handler raised in another thread, such as KeyboardInterrupt.
                raise error if isinstance(error, Exception) else IpcError(f"{error!r} interrupted the collective.")
        if self.call is not None:
            self.call.join()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has failed or finished, including its work on the device."""
        if not self._task.is_done:
            return False
        return self.call is None or self._task.error is not None or bool(self.call.done.query())

    def is_success(self) -> bool:
        """Return whether the collective has finished without an error."""
        return self._task.error is None and self.is_completed()

    def exception(self) -> BaseException | None:
        """Return the exception that the collective raised, or None."""
        return self._task.error

    def synchronize(self) -> None:
        """Do the same as ``wait()``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that receive results."""
        return self.tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of `result()`. Its ``wait()`` raises the exception of the collective."""
        call, task, tensors = self.call, self._task, self.tensors
        started: torch.futures.Future[Any] = (
            torch.futures.Future() if call is None else call.stream.runtime.new_future()
        )

        def complete() -> None:
            if started.done():
                return
            if call is None:
                started.set_result(tensors)
            elif task.error is not None:
                # The device may be broken: a value without tensors does not use it.
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


class FinishedWork(IpcWork):
    """Work of a collective that has finished on the host. Without arguments, because passing them takes as long as a copy.

    Attributes:
        tensors: The tensors that receive results; the creator sets them.
    """

    __init__ = Work.__init__
    _task = DONE
    call = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True."""
        return True


class ReceiveWork(Work):  # type: ignore[misc]  # torch gives it no type
    """Work of a receive into a tensor on an accelerator, whose data first arrives in a host tensor.

    Args:
        work: Gloo's Work of the receive into `host`.
        host: The host tensor.
        tensor: The tensor to copy the data to.
    """

    def __init__(self, work: Any, host: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._host: torch.Tensor | None = host
        self._tensor = tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the data has arrived, then copy it on the caller's stream. May be called again.

        Args:
            timeout: Limit of this wait only; None, zero and negative mean the timeout of the group.

        Raises:
            RuntimeError: The connection to the sender ended, or the timeout expired.
        """
        self._work.wait(timeout) if timeout is not None and timeout > timedelta(0) else self._work.wait()
        host, self._host = self._host, None
        if host is not None:
            self._tensor.data.copy_(host)
        return True

    def is_completed(self) -> bool:
        """Return whether the data is in the tensor, which is so only after ``wait()``."""
        return self._host is None

    def is_success(self) -> bool:
        """Return the same as ``is_completed()``: a failed receive never completes."""
        return self._host is None

    def synchronize(self) -> None:
        """Do the same as ``wait()``."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank of the sender."""
        return int(self._work._source_rank())

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """Return the tensor that receives the data."""
        return [self._tensor]
