"""The queue of a group's calls under exceptions of signal handlers at every place, in other threads' calls, and without threads."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ipc_harness import Job, on_ranks

from ray_fracbackend.ipc.group import executor as module
from ray_fracbackend.ipc.group.executor import DONE, Executor, Task


class Alarm(Exception):
    """What the handler of the signal raises."""


class Gated(SimpleQueue):  # type: ignore[type-arg]
    """Keeps the workers waiting until its gate is open, so that the caller runs the calls."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self.gate.wait()
        return super().get(*args, **kwargs)


class _Point:
    """Turns a trace function's argument into a signal number: the one to deliver, at one point, or none."""

    count = chosen = 0

    @classmethod
    def from_param(cls, frame: FrameType) -> ctypes.c_int:
        cls.count += 1
        if cls.count != cls.chosen:
            return ctypes.c_int(-1)
        sys.settrace(None)
        return ctypes.c_int(signal.SIGALRM)


# In C, so that CPython runs the handler where it does so after this instruction, and not in the trace function.
_deliver = ctypes.PyDLL(None).PyErr_SetInterruptEx
_deliver.argtypes, _deliver.restype = [_Point, ctypes.py_object, ctypes.py_object], None


@contextmanager
def alarm_at(point: int) -> Iterator[None]:
    """Deliver SIGALRM before an instruction of the executor's code, by its number in the block; its handler raises `Alarm`."""

    def handler(*_: object) -> None:
        raise Alarm

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return _deliver if frame.f_code.co_filename == module.__file__ else None

    _Point.count, _Point.chosen = 0, point
    before = signal.signal(signal.SIGALRM, handler)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGALRM, before)


class Program:
    """Queued and synchronous calls of one rank, of which each may be interrupted; the rank then goes on."""

    def __init__(self, gated: bool) -> None:
        self.ran: list[str] = []
        self.broken: list[BaseException] = []
        self.asked: list[str] = []
        self.called_back: list[str] = []
        self.executor = Executor("test", self.broken.append)
        if gated:
            self.executor._tokens = Gated()
        self.executor.start()
        self.tasks: dict[str, Task] = {}
        self.interrupted: set[str] = set()
        steps = "submit a, submit b, wait a, call c, submit d, submit e, wait b, wait d, wait e, call f, submit g"
        self.left = [tuple(step.split()) for step in steps.split(", ")]

    def call(self, name: str) -> Callable[[], None]:
        def function() -> None:
            if self.broken:
                raise RuntimeError("the group is broken")
            self.ran.append(name)

        return function

    def call_back(self, name: str) -> None:
        if name not in self.called_back:  # a callback must bear a second call
            self.called_back.append(name)

    def step(self, name: str, function: Callable[[], Any]) -> Any:
        self.interrupted.add(name)
        try:
            result = function()
            self.interrupted.discard(name)
            return result
        except (Alarm, RuntimeError):
            return None

    def submit(self, name: str) -> None:
        task = self.step(name, lambda: self.executor.submit(self.call(name)))
        if task is not None:
            self.tasks[name] = task
            self.step("future", lambda: self.ask(name))

    def ask(self, name: str) -> None:
        self.tasks[name].when_done(lambda: self.call_back(name))
        self.asked.append(name)

    def run(self) -> None:
        while self.left:
            step, name = self.left.pop(0)
            if step == "submit":
                self.submit(name)
            elif step == "call":
                self.step(name, partial(self.executor.run, self.call(name)))
            elif name in self.tasks:
                self.step("wait", partial(self.executor.finish, self.tasks[name]))

    def check(self) -> None:
        """Each call has run once and in order, or its caller or the whole group knows that it has not."""
        if isinstance(self.executor._tokens, Gated):
            self.executor._tokens.gate.set()
        deadline = time.monotonic() + 5.0
        while not self.executor.is_settled():
            assert time.monotonic() < deadline, "a call waits for the next one"
            time.sleep(0.001)
        assert self.executor.close(5.0)
        assert not any(thread.is_alive() for thread in self.executor._threads)
        assert self.ran == sorted(set(self.ran))
        for name, task in self.tasks.items():
            assert task.is_done
            assert name in self.ran if task.error is None else self.broken
            assert name in self.called_back or name not in self.asked
        missing = set("abcdefg") - set(self.ran)
        assert self.broken or missing <= self.interrupted, (self.ran, self.interrupted)


@pytest.mark.parametrize("gated", [True, False], ids=["caller", "worker"])
def test_an_exception_at_any_place_loses_no_call(gated: bool) -> None:
    """A signal handler raises; a lost call would pair the rank's next call with the other ranks' lost one."""
    point = _Point.count = 0
    while point == _Point.count:  # the last run had such a point
        point += 1
        program = Program(gated)
        with alarm_at(point):
            while program.left:
                with suppress(Alarm):  # it may come between two steps
                    program.run()
        program.check()
    assert point > 100, "a program passes more places"


@pytest.fixture
def by_caller() -> Iterator[Executor]:
    """The thread that waits runs the queue."""
    executor = Executor("test", lambda error: None)
    executor._tokens = gated = Gated()
    executor.start()
    yield executor
    gated.gate.set()
    executor.close(5.0)


def test_an_interrupt_is_for_the_thread_that_it_hit(by_caller: Executor) -> None:
    """The thread that runs another's call raises the signal handler's error; that call has failed, later ones continue."""
    ran = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    first, second = by_caller.submit(interrupted), by_caller.submit(lambda: ran.append(1))
    with pytest.raises(KeyboardInterrupt):
        by_caller.finish(second)
    assert isinstance(first.error, KeyboardInterrupt)
    assert not second.is_done
    by_caller.finish(second)
    assert (second.error, ran) == (None, [1])


def test_the_rest_of_a_call_comes_before_calls_of_other_threads(by_caller: Executor) -> None:
    """One that was queued while the call ran, and one that waits for its end: they would use the call's slot."""
    ran: list[str] = []
    other = threading.Thread(target=by_caller.run, args=(ran.append, "waits"))

    def start() -> None:
        by_caller.submit(lambda: ran.append("queued"))
        other.start()
        time.sleep(0.1)
        by_caller.submit(lambda: ran.append("rest"), is_rest=True)

    by_caller.run(start)
    other.join()
    assert ran == ["rest", "queued", "waits"]


@pytest.mark.parametrize("how", ["run", "finish"])
def test_a_call_in_a_signal_handler_within_a_call_is_an_error(by_caller: Executor, how: str) -> None:
    """It would wait for itself forever."""
    ran = []

    def handler() -> None:
        call = lambda: ran.append("inner")  # noqa: E731
        nested = {"run": lambda: by_caller.run(call), "finish": lambda: by_caller.finish(by_caller.submit(call))}
        with pytest.raises(RuntimeError, match="signal handler or finalizer"):
            nested[how]()
        ran.append("handler")

    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        by_caller.run(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    by_caller.run(lambda: ran.append("after"))
    assert ran == ["handler", *(["inner"] if how == "finish" else []), "after"]


def test_close_within_a_call_says_that_one_is_in_progress(by_caller: Executor) -> None:
    """As a signal handler does that destroys the group."""
    assert by_caller.run(lambda: by_caller.close(0.1)) is False


@pytest.mark.parametrize("can_start", [True, False])
def test_a_callback_that_waits_for_a_later_call(can_start: bool) -> None:
    """Another worker runs it; without a thread for that one, the group is broken in place of a wait without end."""
    errors: list[BaseException] = []
    executor = Executor("test", errors.append)
    executor.start()
    held, later = threading.Event(), []
    task = executor.submit(held.wait)  # type: ignore[arg-type]

    def wait_for_later() -> None:
        if not later:
            later.append(executor.submit(lambda: None))
            deadline = time.monotonic() + 10
            while not (later[0].is_done or errors) and time.monotonic() < deadline:
                time.sleep(0.001)

    task.when_done(wait_for_later)
    if not can_start:
        executor._start_worker = _no_thread  # type: ignore[method-assign]
    held.set()
    while not executor.is_settled():
        time.sleep(0.001)
    assert executor.close(5.0)
    assert later[0].is_done
    assert bool(errors) == (not can_start)


def test_the_future_of_a_finished_call_is_not_kept() -> None:
    """All finished works share one task, which would keep the tensors of each."""
    called: list[int] = []
    DONE.when_done(lambda: called.append(1))
    assert called == [1]
    assert not DONE.has_callbacks()


def test_a_group_that_is_dropped_leaves_no_thread() -> None:
    """As one whose creation fails on another rank."""
    executor = Executor("test", lambda error: None)
    executor.start()
    executor.finish(executor.submit(lambda: None))
    (thread,) = executor._threads
    del executor
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def _no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("backend", ["ipc", "staged"])
@on_ranks(2)
def test_a_rank_that_gets_no_thread_is_an_error_on_every_rank(job: Job, backend: str) -> None:
    """A container's limit of processes; the first asynchronous call would have failed on one rank only."""
    if job.rank == 1:
        Executor._start_worker = _no_thread  # type: ignore[method-assign]
    with pytest.raises(dist.DistBackendError, match=r"rank 1.*can't start new thread"):
        job.init(backend)


@on_ranks(2)
def test_an_interrupted_call_is_lost_on_no_rank(job: Job) -> None:
    """An exception before the call's first step: both ranks get an error, and neither the result of another call."""
    job.init()
    real, tensor = Task.run, torch.ones(4)

    def interrupted(task: Task, on_error: Callable[[BaseException], None]) -> None:
        def raises() -> None:
            raise Alarm

        task._function = raises
        real(task, on_error)

    if job.rank == 0:
        Task.run = interrupted  # type: ignore[method-assign]
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(Alarm if job.rank == 0 else dist.DistBackendError):
        work.wait()
    Task.run = real  # type: ignore[method-assign]
    with pytest.raises(dist.DistBackendError, match="Alarm"):
        dist.all_reduce(torch.full((4,), 100.0))
