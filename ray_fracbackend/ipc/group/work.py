"""Work and Future of a collective, in forms that do not crash torch's C++ callers. Imports torch.

``Future.set_exception`` and a result of None both crash the process inside DDP's reducer, so failures are raised in a
``then`` callback, and the value is always a list of tensors.
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
    """Keep alive the Work that DDP's ``join`` passes to its reducer. Can be called more than once.

    The reducer's C++ does not keep the Python object alive. Without it the reducer waits forever: torch calls the wait
    of the base class, which nothing completes.
    """
    Reducer._set_forward_pass_work_handle = _hand_over_and_keep


def _hand_over_and_keep(reducer: Any, work: Work, use_static_world_size: bool) -> None:
    _hand_over(reducer, work, use_static_world_size)
    _handed_over[reducer] = work  # frees the previous Work only now, when the reducer no longer refers to it


class IpcWork(Work):  # type: ignore[misc]  # torch gives it no type
    """A collective that is done, or that runs or is issued to a device while its caller continues.

    Args:
        task: The queued call, or `DONE`.
        executor: Runs it.
        tensors: The tensors that receive results.
        call: The device call that the task runs; None on the host.
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
        """Block until the collective is done; on a device until it is issued, then the caller's stream waits for it.

        Args:
            timeout: Timeout of only this wait; None, zero and negative mean the collective's timeout.

        Raises:
            IpcError: The collective failed.
            CollectiveTimeoutError: `timeout` passed first; the collective continues.
        """
        if self._task is not DONE:
            timeout_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            if not self._executor.finish(self._task, timeout_s):
                raise CollectiveTimeoutError(f"Work.wait timed out: the collective is not done within {timeout_s} s.")
            error = self._task.error
            if error is not None:
                # An exception of another thread's signal handler is not raised here.
                raise error if isinstance(error, Exception) else IpcError(f"The collective was ended by {error!r}.")
        if self.call is not None:
            self.call.join()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective failed or is done, including its work on a device."""
        if not self._task.is_done():
            return False
        return self.call is None or self._task.error is not None or bool(self.call.done.query())

    def is_success(self) -> bool:
        """Return whether the collective is done without an error."""
        return self._task.error is None and self.is_completed()

    def exception(self) -> BaseException | None:
        """Return the exception of the collective, or None."""
        return self._task.error

    def synchronize(self) -> None:
        """Do the same as ``wait()``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that receive results."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of `result()`; waiting on it raises the exception of the collective."""
        call, task, tensors = self.call, self._task, self._tensors
        started: torch.futures.Future[Any] = (
            torch.futures.Future() if call is None else call.stream.runtime.new_future()
        )

        def complete() -> None:
            if call is None:
                started.set_result(tensors)
            elif task.error is not None:
                # The device may be unusable, and a value without tensors does not use it.
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
        work: Gloo's Work of the tensor on the host.
        host: That tensor.
        tensor: The tensor on the accelerator that receives the data.
    """

    def __init__(self, work: Any, host: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._host: torch.Tensor | None = host
        self._tensor = tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the data has arrived, then copy it on the caller's stream. Can be called more than once.

        Args:
            timeout: Timeout of only this wait; None, zero and negative mean the group's timeout.

        Raises:
            RuntimeError: The sender has exited, or the timeout passed.
        """
        self._work.wait(timeout) if timeout is not None and timeout > timedelta(0) else self._work.wait()
        host, self._host = self._host, None
        if host is not None:
            self._tensor.data.copy_(host)
        return True

    def is_completed(self) -> bool:
        """Return whether the data is in the tensor: only ``wait()`` completes a receive."""
        return self._host is None

    def is_success(self) -> bool:
        """Return the same as ``is_completed()``: a failed receive does not complete."""
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
