"""The order of a group's calls: one at a time, first come first served, from any thread. Imports stdlib only.

A synchronous call runs in the caller's thread once earlier ones are through. An asynchronous one is queued for a
worker thread, so that ranks may start calls of different groups in different orders, as with Gloo; if the caller waits
before the worker got to it, the caller runs it, which saves the change of threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .errors import GroupClosedError


class Task:
    """One queued call.

    Args:
        function: Does the work; blocks.

    Attributes:
        error: What it raised, or None.
        on_done: Called once after the call, in the thread that ran it.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.on_done: list[Callable[[], None]] = []

    def run(self) -> None:
        """Do the work and keep its error."""
        function, self._function = self._function, None
        assert function is not None
        try:
            function()
        except BaseException as error:
            self.error = error
        del function  # the tensors it holds may go now
        with self._lock:
            self._finished.set()
            callbacks, self.on_done = self.on_done, []
        for callback in callbacks:
            callback()

    def fail(self, error: BaseException) -> None:
        """End a call that never ran."""

        def raise_error() -> None:
            raise error

        self._function = raise_error
        self.run()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` after the work, at once if it is done."""
        with self._lock:
            if not self._finished.is_set():
                self.on_done.append(callback)
                return
        callback()

    def is_done(self) -> bool:
        """Whether the work is over, well or badly."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the work; False if `timeout_s` ran out first."""
        return self._finished.wait(timeout_s)


class Executor:
    """Runs one group's calls in order.

    Args:
        name: Of the worker thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._queue: deque[Task] = deque()
        self._wakeup = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False

    def run(self, function: Callable[[], None]) -> None:
        """Run `function` in this thread, after everything queued before."""
        with self._turn:
            self._drain(None)
            function()

    def submit(self, function: Callable[[], None]) -> Task:
        """Queue `function`.

        Raises:
            GroupClosedError: The executor was closed.
        """
        task = Task(function)
        with self._wakeup:
            if self._closed:
                raise GroupClosedError("The process group was shut down or aborted; make a new one.")
            self._queue.append(task)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()
            self._wakeup.notify()
        return task

    def finish(self, task: Task) -> None:
        """Return once `task` is over, running it here if nobody has begun it."""
        if not task.is_done():
            with self._turn:
                if not task.is_done():
                    self._drain(task)

    def _drain(self, last: Task | None) -> None:
        # The caller holds the turn, so the queue's head cannot be run by anybody else.
        while self._queue:
            task = self._queue.popleft()
            task.run()
            if task is last:
                return

    def _work(self) -> None:
        while True:
            with self._wakeup:
                while not self._queue and not self._closed:
                    self._wakeup.wait()
                if self._closed and not self._queue:
                    return
            with self._turn:
                if self._queue:
                    self._drain(self._queue[0])

    def close(self, timeout_s: float) -> bool:
        """Take no more calls; wait up to `timeout_s` seconds for those queued. Returns whether all are over."""
        with self._wakeup:
            self._closed = True
            self._wakeup.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(timeout_s)
        # A synchronous call of another thread holds the turn.
        free = self._turn.acquire(timeout=timeout_s)
        if free:
            self._turn.release()
        return free and not self._queue
