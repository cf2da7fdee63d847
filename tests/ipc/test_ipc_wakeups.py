"""No wake-up is lost: the real code of publishing and waiting, in every interleaving with a limited number of preemptions.

Ranks are threads that take turns: at each access to a word, each fence and each call of the kernel another thread may continue. Sleeps do
not end by themselves here, so a rank that is not woken sleeps forever, and the test fails. Memory is sequentially consistent here;
test_ipc_fences.py tests the fences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from ipc_calls import control_pages, waiter_of

from ray_fracbackend.ipc import knobs
from ray_fracbackend.ipc.protocol import waiting
from ray_fracbackend.ipc.protocol.schedule import WRITTEN

Rank = Sequence[Callable[[waiting.Waiter], None]]


class Turns:
    """Lets one thread run at a time, by a list of choices and then without preemption.

    Args:
        choices: The thread to continue with at each point; may be shorter than the run.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = choices
        # For each point: the threads that could continue, the one that did, and the one that was at it.
        self.trace: list[tuple[list[int], int, int]] = []
        self.is_stuck = False
        self._local = threading.local()
        self._turns: list[threading.Semaphore] = []
        self._asleep: dict[int, int] = {}
        self._ended: set[int] = set()
        self._over = threading.Event()

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run the functions, each in a thread, until all have ended or all remaining ones sleep."""
        self._turns = [threading.Semaphore(0) for _ in functions]
        threads = [
            threading.Thread(target=self._thread, args=(number, function), daemon=True)
            for number, function in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        self._go_on(0)
        assert self._over.wait(60)

    def _thread(self, number: int, function: Callable[[], None]) -> None:
        self._local.number = number
        self._turns[number].acquire()
        function()
        self._ended.add(number)
        self._go_on(number)

    def _go_on(self, current: int) -> bool:
        """Choose the thread to continue; return whether it is the current one."""
        able = [n for n in range(len(self._turns)) if n not in self._ended and n not in self._asleep]
        if not able:
            self.is_stuck = bool(self._asleep)
            self._over.set()
            return False
        place = len(self.trace)
        chosen = self.choices[place] if place < len(self.choices) else (current if current in able else able[0])
        self.trace.append((able, chosen, current))
        if chosen == current and current not in self._ended and hasattr(self._local, "number"):
            return True
        self._turns[chosen].release()
        return False

    def point(self) -> None:
        """A point at which another thread may continue."""
        number = self._local.number
        if not self._go_on(number):
            self._turns[number].acquire()

    def sleep(self, offset: int) -> None:
        """Sleep until `wake`."""
        number = self._local.number
        self._asleep[number] = offset
        self._go_on(number)
        self._turns[number].acquire()

    def wake(self, offset: int) -> None:
        """Wake all threads that sleep on the word."""
        self._asleep = {number: at for number, at in self._asleep.items() if at != offset}


class Points:
    """Memory whose accesses are points."""

    def __init__(self, memory: Any, turns: Turns) -> None:
        self.memory, self._turns = memory, turns

    def __getitem__(self, index: Any) -> Any:
        self._turns.point()
        return self.memory[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._turns.point()
        self.memory[index] = value


class Kernel:
    """The two calls of a futex."""

    def __init__(self, words: Any, turns: Turns) -> None:
        self._words, self._turns = words, turns

    def wait(self, offset: int, expected: int, timeout_s: float) -> None:
        self._turns.point()
        if self._words[offset // 8] == expected:
            self._turns.sleep(offset)

    def wake(self, offset: int) -> None:
        self._turns.point()
        self._turns.wake(offset)


def take(steps: Rank, waiter: waiting.Waiter) -> None:
    for step in steps:
        step(waiter)


def play(ranks: Sequence[Rank], choices: Sequence[int]) -> Turns:
    turns = Turns(choices)
    pages, address = control_pages(len(ranks))
    waiters = []
    for page in pages:
        words = page.words
        page.words, page._bytes = Points(words, turns), Points(page._bytes, turns)  # type: ignore[assignment]
        waiter = waiter_of(page, address, len(ranks))
        waiter._futex = Kernel(words, turns)  # type: ignore[assignment]
        waiter._raise_if_hopeless = lambda *_: None  # type: ignore[method-assign]
        waiters.append(waiter)
    turns.run([partial(take, *rank) for rank in zip(ranks, waiters, strict=True)])
    return turns


def interleavings(ranks: Sequence[Rank], bound: int) -> Iterator[Turns]:
    """Yield all interleavings with at most this number of preemptions."""
    prefixes: list[tuple[list[int], int]] = [([], 0)]
    while prefixes:
        prefix, spent = prefixes.pop()
        turns = play(ranks, prefix)
        yield turns
        chosen = [choice for _, choice, _ in turns.trace]
        for place in range(len(prefix), len(turns.trace)):
            able, choice, current = turns.trace[place]
            for other in able:
                cost = spent + (current in able)
                if other != choice and cost <= bound:
                    prefixes.append(([*chosen[:place], other], cost))


def publish(number: int) -> Callable[[waiting.Waiter], None]:
    return lambda waiter: waiter.publish(number, number, number)


def wait(number: int, peer: int = 0) -> Callable[[waiting.Waiter], None]:
    return lambda waiter: waiter.wait(peer, WRITTEN, number, 1e12, "a test")


# Ranks, each with the chunks that it announces and waits for, and the number of preemptions.
CASES: dict[str, tuple[list[Rank], int]] = {
    "one sleeper": ([[publish(1), publish(2)], [wait(1), wait(2)]], 2),
    "a meeting": ([[publish(1), wait(1, peer), publish(2), wait(2, peer)] for peer in (1, 0)], 2),
    "two sleepers": ([[publish(1), publish(2)], [wait(1), wait(2)], [wait(2)]], 2),
}


@pytest.mark.parametrize("name", ["one sleeper", "a meeting", pytest.param("two sleepers", marks=pytest.mark.full)])
def test_no_wake_up_is_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for announced chunks continues, although it never reads the clock."""
    monkeypatch.setenv(knobs.SPIN_US_ENV_VAR, "0")
    monkeypatch.setattr(waiting, "_BARE_POLLS", 1)
    monkeypatch.setattr(waiting, "_POLLS_PER_YIELD", 1)
    ranks, bound = CASES[name]
    number = 0
    for turns in interleavings(ranks, bound):
        number += 1
        assert not turns.is_stuck, [choice for _, choice, _ in turns.trace]
    assert number > 100
