"""Run a group's calls in order, one at a time, from any thread. Imports only the errors' base class from torch.

A synchronous call runs in the caller's thread after all earlier calls. An asynchronous call is queued for a worker
thread, so ranks may start calls of different groups in different orders, as with Gloo. If the caller waits before the
worker has started the call, the caller runs it, which saves a thread switch.

A signal handler, such as that of Ctrl-C, may raise between any two steps of the main thread. Therefore a call stays
first in the queue until it has run or has failed, and a worker, which handlers do not reach, ends each call and its
callbacks, whatever another thread has done of it. tests/ipc raises an exception at each such place.

Callbacks of futures run outside the lock. While a worker runs one, another serves the queue: a callback may launch a
call of the same group and wait for it.

At exit, Python stops daemon threads at any point. Inside an operation of torch's C++, this ends the process with
SIGABRT. Therefore the interpreter's exit waits a moment for calls that the script did not wait for.

A forked child has a copy of the parent's group with its shared memory: the peers would mistake a call there for one of
the parent. Therefore an executor accepts calls only in the process that created it. It compares a number that Python
raises in every forked child, because asking the system for the process ID takes longer.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from ..errors import GroupClosedError

# How long the interpreter's exit waits for calls in progress; calls that wait for a peer may take much longer.
_EXIT_S = 1.0
_LOOK_S = 0.5e-3

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
        is_done: Whether the work has finished or failed.
        error: The exception that it raised, or None.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[], None]] = []
        self.is_done = False
        self.error: BaseException | None = None

    def run(self, on_error: Callable[[BaseException], None]) -> None:
        """Do the work and keep its error, which `on_error` gets too; the caller runs `call_back` afterwards."""
        try:
            if self._function is not None:
                self._function()
        except BaseException as error:
            self.error = error
            on_error(error)
        self._function = None  # release its tensors
        self.is_done = True

    def call_back(self) -> None:
        """Run the callbacks that `when_done` queued. May be called again, also from another thread."""
        with self._lock:
            for callback in self._callbacks:
                callback()
            self._callbacks.clear()

    def has_callbacks(self) -> bool:
        """Return whether `call_back` has something to run."""
        return bool(self._callbacks)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` after the work, or at once if the work is done. It must do nothing if it is called again."""
        if not self.is_done:
            self._callbacks.append(callback)
            if not self.is_done:
                return
        with self._lock:
            callback()


# Task of a Work whose call has already finished.
DONE = Task(lambda: None)
DONE.run(lambda error: None)


class Executor:
    """Runs one group's calls in order.

    Args:
        name: Name of its threads, for debuggers.
        on_error: Called with the exception of a call, also of one that was interrupted before its first step.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name = name
        self._on_error = on_error
        # Held while a call runs. Reentrant: in a call's own thread a signal handler must get an error, not a deadlock.
        self._turn = threading.RLock()
        self._is_running = False
        self._queue: deque[Task] = deque()
        # Each task once, for the workers; None ends them. Its methods are safe in signal handlers.
        self._tokens: SimpleQueue[Task | None] = SimpleQueue()
        # Guards the fields below, which only workers change later. A worker that runs callbacks is not idle.
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._closed = False
        self._pid, self._num_forks = os.getpid(), _num_forks
        _executors.add(self)

    def start(self) -> None:
        """Start the first worker; before the first `submit`.

        Raises:
            RuntimeError: The system does not provide a thread.
        """
        self._start_worker()
        weakref.finalize(self, self._tokens.put, None).atexit = False  # for a group that is dropped without an end

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
        with self._turn:
            if self._queue:
                self._run_queued()
            if self._is_running:
                raise _nested_error()
            try:
                self._is_running = True
                return function(*args)
            except BaseException as error:
                self._on_error(error)
                raise
            finally:
                self._is_running = False

    def is_free(self) -> bool:
        """Return whether no call is queued or runs."""
        return not self._queue and not self._is_running

    def submit(self, function: Callable[[], None], is_rest: bool = False) -> Task:
        """Queue `function`.

        Args:
            function: Does the work.
            is_rest: Whether it ends the call that this thread runs, so that it comes before all queued calls.

        Raises:
            GroupClosedError: The executor was closed, or this is a forked child of the group's process.
        """
        self._check_process()
        if self._closed:
            raise GroupClosedError("The process group was shut down or aborted; create a new one.")
        task = Task(function)
        add = self._queue.appendleft if is_rest else self._queue.append
        try:
            add(task)
        finally:
            self._tokens.put(task)
        if self._closed:  # meanwhile: the workers may have ended
            self._run_queued(task)
        return task

    def finish(self, task: Task, timeout_s: float | None = None) -> bool:
        """Return True once `task` is done, running it in this thread if none has started it; False after `timeout_s`.

        Raises:
            GroupClosedError: This is a forked child of the group's process.
            RuntimeError: This thread runs another call.
        """
        if task.is_done:
            return True
        self._check_process()
        if timeout_s is None:
            self._run_queued(task)
            task.call_back()
            return task.is_done
        deadline = time.monotonic() + timeout_s
        while not task.is_done and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return task.is_done

    def _run_queued(self, last: Task | None = None) -> None:
        """Run queued tasks up to `last`, or all.

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
                while self._queue and not (last is not None and last.is_done):
                    task = self._queue[0]
                    task.run(self._on_error)
                    self._queue.popleft()
                    if task.error is not None and not isinstance(task.error, Exception):
                        raise task.error
            finally:
                self._is_running = False

    def _start_worker(self) -> None:
        thread = threading.Thread(target=_work, args=(weakref.ref(self), self._tokens), name=self._name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._num_idle += 1

    def serve(self, task: Task) -> None:
        """End a task and its callbacks, if no other thread has; in a worker."""
        if task.is_done and not self._queue and not task.has_callbacks():
            return
        with self._lock:
            self._num_idle -= 1
        with suppress(BaseException):  # the task keeps the error
            self._run_queued(task)
        if task.has_callbacks():
            with self._lock:
                if not self._num_idle:
                    try:
                        self._start_worker()
                    except RuntimeError as error:
                        self._on_error(error)
            task.call_back()
        with self._lock:
            self._num_idle += 1

    def is_settled(self) -> bool:
        """Return whether the queue is empty and all threads are idle."""
        return not self._queue and self._num_idle == len(self._threads)

    def close(self, timeout_s: float) -> bool:
        """Accept no more calls, wait up to `timeout_s` seconds for queued ones, and return whether all have ended."""
        deadline = time.monotonic() + timeout_s
        self._closed = True
        self._tokens.put(None)
        for thread in self._threads:  # a worker may start another
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        # A synchronous call of another thread holds the lock. One of this thread was interrupted by a signal handler.
        free = self._turn.acquire(timeout=max(0.0, deadline - time.monotonic()))
        if free:
            free = not self._is_running
            self._turn.release()
        return free and not self._queue


def _work(executor_of: Callable[[], Executor | None], tokens: SimpleQueue[Task | None]) -> None:
    """Serve the tokens of an executor, without keeping it alive."""
    while (task := tokens.get()) is not None and (executor := executor_of()) is not None:
        executor.serve(task)
        del executor, task
    tokens.put(None)


def _nested_error() -> RuntimeError:
    return RuntimeError(
        "A signal handler or finalizer called a collective, or waited for one, while its thread was in another "
        "call of the same group, which cannot continue before the handler returns; set a flag there and call it later."
    )
