"""Run a group's calls in order, one at a time, from any thread. Imports only the errors' base class from torch.

A synchronous call runs in the caller's thread after all earlier calls. An asynchronous call is queued for a worker
thread, so ranks may start calls of different groups in different orders, as with Gloo. If the caller waits before the
worker has started the call, the caller runs it, which saves a thread switch.

Callbacks of futures run outside the lock. While a worker runs a callback, another worker serves the queue: a callback
may launch a call of the same group and wait for it.

At exit, Python stops daemon threads at any point. Inside an operation of torch's C++, this ends the process with
SIGABRT. Therefore the interpreter's exit waits a moment for calls that the script did not wait for.

A forked child has a copy of the parent's group with its shared memory: the peers would mistake a call there for one of
the parent. Therefore an executor accepts calls only in the process that created it. It compares a number that Python
raises in every forked child, because asking the system for the process ID takes longer.
"""

from __future__ import annotations

import atexit
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..errors import GroupClosedError

# How long the interpreter's exit waits for calls in progress; calls that wait for a peer may take much longer.
_EXIT_S = 1.0

_Value = TypeVar("_Value")
_executors: weakref.WeakSet[Executor] = weakref.WeakSet()
# Forks between the first process that imported this module and this one.
_num_forks = 0


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_count_fork)


@atexit.register
def _settle() -> None:
    deadline = time.monotonic() + _EXIT_S
    waited_for = [executor for executor in _executors if executor.is_own()]
    while time.monotonic() < deadline and not all(executor.is_settled() for executor in waited_for):
        time.sleep(0.001)


class Task:
    """One queued call.

    Args:
        function: Does the work; blocks.

    Attributes:
        error: The exception that it raised, or None.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work and keep its error; the caller runs `call_back` afterwards."""
        function, self._function = self._function, None
        assert function is not None
        try:
            function()
        except BaseException as error:
            self.error = error
        del function  # release its tensors
        with self._lock:
            self._finished.set()

    def call_back(self) -> None:
        """Run the callbacks that `when_done` queued."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def has_callbacks(self) -> bool:
        """Return whether `call_back` has something to run."""
        return bool(self._callbacks)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` after the work, or at once if the work is done."""
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def is_done(self) -> bool:
        """Return whether the work has finished or failed."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the work; return False if it is not done within `timeout_s` seconds."""
        return self._finished.wait(timeout_s)


# Task of a Work whose call has already finished.
DONE = Task(lambda: None)
DONE.run()


class Executor:
    """Runs one group's calls in order.

    Args:
        name: Name of its threads, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Held while a call runs. Reentrant: in a call's own thread a signal handler must get an error, not a deadlock.
        self._turn = threading.RLock()
        self._is_running = False
        self._queue: deque[Task] = deque()
        # Guards the fields below and wakes workers. A worker is free (serves or awaits the queue) or in a callback.
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_free = 0
        self._num_waiting = 0
        self._closed = False
        self._pid, self._num_forks = os.getpid(), _num_forks
        _executors.add(self)

    def is_own(self) -> bool:
        """Return whether this is the process that created the group, and not a forked child."""
        return self._num_forks == _num_forks

    def _check_process(self) -> None:
        if not self.is_own():
            raise GroupClosedError(
                f"The process group belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: call "
                "collectives in the parent, or start the child with 'spawn' and create a group there."
            )

    def run(self, function: Callable[..., _Value], *args: Any) -> _Value:
        """Run ``function(*args)`` in this thread, after all queued calls, and return its value.

        Raises:
            GroupClosedError: This is a forked child of the group's process.
            RuntimeError: This thread runs another call.
        """
        if self._num_forks != _num_forks:
            self._check_process()
        if self._queue:
            self._run_queued(lambda: True)
        with self._turn:
            if self._is_running:
                raise _nested_error()
            try:
                self._is_running = True
                return function(*args)
            finally:
                self._is_running = False

    def submit(self, function: Callable[[], None]) -> Task:
        """Queue `function`.

        Raises:
            GroupClosedError: The executor was closed, or this is a forked child of the group's process.
        """
        self._check_process()
        task = Task(function)
        with self._changed:
            if self._closed:
                raise GroupClosedError("The process group was shut down or aborted; create a new one.")
            self._queue.append(task)
            self._serve()
        return task

    def finish(self, task: Task, timeout_s: float | None = None) -> bool:
        """Return True once `task` is done, running it in this thread if none has started it; False after `timeout_s`.

        Raises:
            GroupClosedError: This is a forked child of the group's process.
            RuntimeError: This thread runs another call.
        """
        if task.is_done():
            return True
        self._check_process()
        if timeout_s is not None:
            return task.wait(timeout_s)
        self._run_queued(lambda: not task.is_done())
        return True

    def _run_queued(self, is_wanted: Callable[[], bool]) -> None:
        """Run queued tasks and their callbacks while ``is_wanted()`` is true; raises as `_take_turn` does."""
        done: list[Task] = []
        try:
            self._take_turn(done, is_wanted)
        finally:
            for task in done:
                task.call_back()

    def _take_turn(self, done: list[Task], is_wanted: Callable[[], bool]) -> None:
        """Run queued tasks while ``is_wanted()`` is true, and append each to `done`.

        Raises:
            BaseException: A signal handler raised it during a task, such as KeyboardInterrupt. It belongs to this
                thread, and not to the threads that wait for the interrupted task.
            RuntimeError: This thread runs another call.
        """
        with self._turn:
            if self._is_running:
                raise _nested_error()
            try:
                self._is_running = True
                while self._queue and is_wanted():
                    task = self._queue.popleft()
                    task.run()
                    done.append(task)
                    if task.error is not None and not isinstance(task.error, Exception):
                        raise task.error
            finally:
                self._is_running = False

    def _serve(self) -> None:
        """Make sure that a worker serves the queue; the caller holds the lock."""
        if self._num_free:
            self._changed.notify()
            return
        self._num_free += 1
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._num_waiting += 1
                    self._changed.wait()
                    self._num_waiting -= 1
            done: list[Task] = []
            with suppress(BaseException):  # the task keeps the error
                self._take_turn(done, partial(operator.not_, done))
            if done and done[0].has_callbacks():
                with self._changed:
                    self._num_free -= 1
                    if self._queue:
                        self._serve()
                done[0].call_back()
                with self._changed:
                    self._num_free += 1

    def is_settled(self) -> bool:
        """Return whether the queue is empty and all threads are idle."""
        with self._changed:
            return not self._queue and self._num_waiting == sum(thread.is_alive() for thread in self._threads)

    def close(self, timeout_s: float) -> bool:
        """Accept no more calls, wait up to `timeout_s` seconds for queued ones, and return whether all have ended."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        # A synchronous call of another thread holds the lock. One of this thread was interrupted by a signal handler.
        free = self._turn.acquire(timeout=max(0.0, deadline - time.monotonic()))
        if free:
            free = not self._is_running
            self._turn.release()
        return free and not self._queue


def _nested_error() -> RuntimeError:
    return RuntimeError(
        "A signal handler or finalizer called a collective, or waited for one, while its thread was in another "
        "call of the same group, which cannot continue before the handler returns; set a flag there and call it later."
    )
