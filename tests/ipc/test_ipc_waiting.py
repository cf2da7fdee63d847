"""Polling before sleep, on a clock and a kernel that the test controls; and real sleep and wake-up."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from ipc_calls import control_pages, waiter_of

from ray_fracbackend.ipc import knobs
from ray_fracbackend.ipc.errors import CollectiveTimeoutError
from ray_fracbackend.ipc.protocol import waiting
from ray_fracbackend.ipc.protocol.schedule import DONE, READ, WRITTEN

WAKE_US = 60.0


class Kernel:
    """Replaces `time` and `os`: time passes only in yields and sleeps, and the peer publishes at a given time."""

    def __init__(self) -> None:
        (self.page, _), self.address = control_pages(2)
        self.now_us, self.due_us, self.step, self.num_sleeps = 0.0, 0.0, 0, 0
        # Cost of a yield, and number of yields.
        self.yield_us, self.num_yields = 1.0, 0

    def sched_getaffinity(self, pid: int) -> set[int]:
        return {0, 1}

    def monotonic(self) -> float:
        return self.now_us * 1e-6

    def sched_yield(self) -> None:
        self.num_yields += 1
        self.pass_time(self.yield_us)

    def pass_time(self, microseconds: float = 1.0) -> None:
        self.now_us += microseconds
        if self.now_us >= self.due_us:
            self.publish()

    def publish(self) -> None:
        self.page.words[self.page.counter_index[1] + WRITTEN] = self.step

    def sleep(self, *_: object) -> None:
        self.num_sleeps += 1
        self.now_us = max(self.now_us, self.due_us) + WAKE_US
        self.publish()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(waiting, "time", found)
    monkeypatch.setattr(waiting, "os", found)
    return found


def waiter_on(kernel: Kernel) -> waiting.Waiter:
    found = waiter_of(kernel.page, kernel.address)
    found._futex.wait = kernel.sleep  # type: ignore[method-assign]
    found._let_threads_run = kernel.pass_time  # type: ignore[assignment, return-value]
    return found


def sleeps(kernel: Kernel, waiter: waiting.Waiter, delay_us: float, num_waits: int) -> int:
    """Return how many of a number of waits for a peer that needs `delay_us` end in a sleep."""
    before = kernel.num_sleeps
    for _ in range(num_waits):
        kernel.step += 1
        kernel.due_us = kernel.now_us + delay_us
        waiter.wait(1, WRITTEN, kernel.step, kernel.monotonic() + 60, "a test")
    return kernel.num_sleeps - before


def test_polling_fits_the_length_of_waits(kernel: Kernel) -> None:
    """A peer that comes within the longest poll costs no wake-up, one that needs milliseconds soon almost no polling, and back again."""
    waiter = waiter_on(kernel)
    assert sleeps(kernel, waiter, 100, 20) == 0
    assert sleeps(kernel, waiter, 5000, 20) == 20
    assert waiter._spin_us == waiting._MIN_SPIN_US
    assert sleeps(kernel, waiter, 100, 20) == 1


def test_a_yield_that_costs_a_time_slice_is_not_repeated_soon(kernel: Kernel) -> None:
    """Beside a process that never sleeps, each yield would cost milliseconds; without one, yields resume."""
    waiter = waiter_on(kernel)
    kernel.yield_us = 3000.0
    sleeps(kernel, waiter, 100, 1000)
    assert kernel.num_yields < 10
    kernel.yield_us = 1.0
    before = kernel.num_yields
    assert sleeps(kernel, waiter, 100, waiting._MAX_UNYIELDING + 10) == 0
    assert kernel.num_yields > before


def test_with_more_ranks_than_cores_a_yield_goes_to_a_rank(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is worth its time, however long."""
    monkeypatch.setattr(kernel, "sched_getaffinity", lambda pid: {0})
    waiter = waiter_on(kernel)
    kernel.yield_us = 3000.0
    assert sleeps(kernel, waiter, 100, 100) == 0
    assert kernel.num_yields == 100


def test_a_moments_wait_before_a_later_chunk(kernel: Kernel) -> None:
    """A rank polls for a peer that is nearly there, and for a shorter and shorter time for one that is not; it never sleeps for it."""
    waiter = waiter_on(kernel)
    kernel.step, kernel.due_us = 1, 100.0
    assert waiter.poll(1, WRITTEN, 1)
    for _ in range(10):
        kernel.due_us = kernel.now_us + 1e6
        assert not waiter.poll(1, WRITTEN, 2)
    assert waiter._spin_us == waiting._MIN_SPIN_US
    assert kernel.num_sleeps == 0


@pytest.mark.parametrize(
    ("positions", "stopped", "named"),
    [
        ([5, 5, 5], None, 1),
        ([5, 2, 5], None, 1),
        ([5, 5, 2], None, 2),
        ([5, 2, 5], 2, 2),
        ([5, 5, 5], 2, 2),
        ([5, 2, 5], 1, 1),
    ],
)
def test_a_timeout_names_the_rank_that_the_others_wait_for(
    positions: list[int], stopped: int | None, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 1, which may itself wait for rank 2: a stopped one is named, else the one with the lowest counts."""
    monkeypatch.setenv(knobs.SPIN_US_ENV_VAR, "0")
    (page, *_), address = control_pages(3)
    for rank, position in enumerate(positions):
        for kind in (WRITTEN, READ, DONE):
            page.words[page.counter_index[rank] + kind] = position
    waiter = waiter_of(page, address, 3)
    if stopped is not None:
        monkeypatch.setattr(waiter.peers[stopped], "state", lambda: "stopped")
    state = "stopped" if stopped == named else "running"
    with pytest.raises(
        CollectiveTimeoutError, match=rf"^rank {named} \(pid \d+, {state}\) did not reach a test in time"
    ):
        waiter.wait(1, WRITTEN, 6, time.monotonic(), "a test")


def test_sleepers_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that publishes a step wakes the ranks that sleep for it, without a check of their own."""
    monkeypatch.setattr(waiting, "_SLICE_S", 3600.0)
    monkeypatch.setenv(knobs.SPIN_US_ENV_VAR, "0")
    pages, address = control_pages(2)
    sleeper, publisher = (waiter_of(page, address) for page in pages)
    steps = range(1, 11)

    def sleep_for_each_step() -> None:
        for step in steps:
            sleeper.wait(1, WRITTEN, step, time.monotonic() + 3600, "a test")

    thread = threading.Thread(target=sleep_for_each_step, daemon=True)
    thread.start()
    for step in steps:
        end = time.monotonic() + 30
        while not any(pages[1].words[index] for index in pages[1].sleepers):
            assert time.monotonic() < end, "the sleeper was not woken"
            time.sleep(0.001)
        time.sleep(0.01)  # the part between its mark and its sleep
        publisher.publish(step, step, step)
    thread.join(30)
    assert not thread.is_alive()


def test_a_rank_that_polls_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes its lock from no thread here, so the polling thread must release it."""
    monkeypatch.setenv(knobs.SPIN_US_ENV_VAR, str(1_000_000))
    (page, _), address = control_pages(2)
    waiter = waiter_of(page, address)
    polls, before, met = threading.Event(), sys.getswitchinterval(), []

    def wait() -> None:
        polls.set()
        met.append(waiter._spin(page.counter_index[1], 1, time.monotonic() + 5))

    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        polls.wait()
        time.sleep(0.01)
        # Reached before the polling ends.
        page.words[page.counter_index[1]] = 1
    finally:
        sys.setswitchinterval(before)
    thread.join(60)
    assert met == [True]


def test_poison_wakes_everybody(kernel: Kernel) -> None:
    """Sleepers on every rank's bell are woken and read the poison."""
    waiter, woken = waiter_on(kernel), []
    waiter._futex.wake = lambda offset: woken.append((offset, waiter.is_poisoned()))  # type: ignore[method-assign]
    waiter.poison("a reason")
    assert woken == [(index * 8, True) for index in kernel.page.bell_index]
