"""Publish a step and wait for the peers' steps: spin, then sleep, with deadline, liveness and poison.

A waiter polls the counter for a short, adaptive time, then sleeps on it with a futex, in slices, and looks between slices
at the poison word, the deadline and the peer's process. A peer that published before it died or left is not an error: its
memory is still mapped.
"""

from __future__ import annotations

import os
import time

from .. import knobs
from ..errors import CollectiveMismatchError, CollectiveTimeoutError, GroupPoisonedError, PeerLostError
from ..host.atomics import Futex, make_fences
from ..host.liveness import Peer
from .control import ControlPage
from .description import description_text

# Polls before the first system call: a peer that runs at the same time answers within these.
_BARE_POLLS = 64
_POLLS_PER_YIELD = 16
# Longest sleep without a look at deadline and liveness.
_SLICE_S = 0.05
_MIN_SPIN_US = 5
# A wait of up to so many times the longest poll, with the wake-up in it, counts as one that polling could have met.
_NEAR_MISS = 1.5


class Waiter:
    """One rank's side of the counters of a host.

    Args:
        control: The control page.
        address: Address at which it is mapped.
        peers: Processes of the local ranks, by local rank.
        names: How messages call each local rank, such as "rank 3".

    Attributes:
        peers: As given.
        beside: This rank's side of the group's other kind of memory, whose calls are counted on a page of their own; None until
            there is one.
    """

    def __init__(self, control: ControlPage, address: int, peers: list[Peer], names: list[str]) -> None:
        _, self._acquire_fence, self._full_fence = make_fences()
        self.beside: Waiter | None = None
        self._control = control
        self._words = control.words
        self._counters = control.counter_index
        self._sleepers = control.sleepers_index
        self._futex = Futex(address)
        self.peers = peers
        self._names = names
        self._own = control.counter_index[control.rank]
        self._own_sleepers = control.sleepers_index[control.rank]
        num_cores = len(os.sched_getaffinity(0))
        self._max_spin_us = float(knobs.spin_us())
        # With more ranks than cores, polling takes time from the very rank that is waited for: yield at once.
        self._bare_polls = _BARE_POLLS if control.num_ranks <= num_cores else 1
        self._spin_us = self._max_spin_us

    def publish(self, step: int) -> None:
        """Announce to the peers that this rank's writes up to `step` are done, and wake those that sleep."""
        self._words[self._own] = step
        self._full_fence()
        if self._words[self._own_sleepers]:
            self._words[self._own_sleepers] = 0
            self._futex.wake(self._own * 8)

    def wait(self, peer: int, step: int, deadline: float, what: str) -> None:
        """Return once local rank `peer` has published `step`.

        Args:
            peer: Local rank.
            step: Step number.
            deadline: `time.monotonic` value after which to give up.
            what: The call, for messages.

        Raises:
            GroupPoisonedError: A rank has failed.
            PeerLostError: The peer's process has ended or it has shut its group down.
            CollectiveTimeoutError: The deadline has passed.
        """
        words, index = self._words, self._counters[peer]
        if words[index] >= step:
            return
        for _ in range(self._bare_polls):
            if words[index] >= step:
                return
        started = time.monotonic()
        if not self._spin(index, step, started + self._spin_us * 1e-6):
            self._sleep(peer, step, deadline, what)
            self._adapt(time.monotonic() - started)

    def _spin(self, index: int, step: int, end: float) -> bool:
        words = self._words
        while True:
            for _ in range(_POLLS_PER_YIELD):
                if words[index] >= step:
                    return True
            if time.monotonic() >= end:
                return False
            os.sched_yield()

    def _adapt(self, waited_s: float) -> None:
        """Poll in full where that would about have met the peer, and ever less where peers keep this rank waiting."""
        if waited_s <= self._max_spin_us * _NEAR_MISS * 1e-6:
            self._spin_us = self._max_spin_us
        else:
            self._spin_us = max(self._spin_us / 2, min(_MIN_SPIN_US, self._max_spin_us))

    def _sleep(self, peer: int, step: int, deadline: float, what: str) -> None:
        words, index = self._words, self._counters[peer]
        while True:
            seen = words[index]
            if seen >= step:
                return
            self._raise_if_hopeless(peer, step, deadline, what)
            words[self._sleepers[peer]] = 1
            self._full_fence()
            if words[index] == seen and self._control.poisoner() is None:
                self._futex.wait(index * 8, seen, max(0.0, min(_SLICE_S, deadline - time.monotonic())))

    def _raise_if_hopeless(self, peer: int, step: int, deadline: float, what: str) -> None:
        self.raise_if_poisoned(what)
        if self.beside is not None:
            self.beside.raise_if_poisoned(what)
        # Every rank that has not come yet must still be able to, not only the one that is waited for first.
        for rank in range(self._control.num_ranks):
            if self._words[self._counters[rank]] < step and rank != self._control.rank:
                self._raise_if_gone(rank, step, what)
                self._raise_if_beside(rank, step, what)
        if time.monotonic() >= deadline and self._words[self._counters[peer]] < step:
            process = self.peers[peer]
            raise CollectiveTimeoutError(
                f"{self._names[peer]} (pid {process.pid}, {process.state()}) did not reach {what} in time: the call "
                "timed out. Look there first, or raise the timeout of the group."
            )

    def _raise_if_gone(self, rank: int, step: int, what: str) -> None:
        # In this order: a process that ends has set its mark before.
        alive, closed = self.peers[rank].is_alive(), self._control.is_closed(rank)
        if alive and not closed:
            return
        # It may have published the step and left since the counter was read.
        self._acquire_fence()
        if self._words[self._counters[rank]] >= step:
            return
        # Or have failed, given its reason, and left: the reason says more than the absence.
        self.raise_if_poisoned(what)
        if alive:
            raise PeerLostError(f"{self._names[rank]} shut its process group down before it reached {what}.")
        raise PeerLostError(f"{self._names[rank]} (pid {self.peers[rank].pid}) died before it reached {what}.")

    def _raise_if_beside(self, rank: int, step: int, what: str) -> None:
        """Raise if a peer is ahead in the other memory: ranks make all calls in one order, so it will not come here."""
        there = self.beside
        if there is None:
            return
        own_step = there._words[there._own]
        if there._words[there._counters[rank]] <= own_step:
            return
        # It may have passed here first and gone on to there since.
        self._acquire_fence()
        if self._words[self._counters[rank]] >= step:
            return
        call = description_text(there._control.description(rank, own_step + 1))
        raise CollectiveMismatchError(
            f"{self._names[self._control.rank]} called {what} while {self._names[rank]} called {call} as the same "
            f"collective of the group, with tensors of another device; every rank must make the same calls in the same "
            f"order, on the same kind of device."
        )

    def raise_if_poisoned(self, what: str) -> None:
        """Raise what another rank poisoned the group with.

        Raises:
            GroupPoisonedError: The group is poisoned.
        """
        culprit = self._control.poisoner()
        if culprit is not None:
            self._acquire_fence()
            raise GroupPoisonedError(
                f"{what}: {self._names[culprit]} failed and the process group cannot be used any more. "
                f"Its reason: {self._control.reason(culprit)}"
            )

    def is_poisoned(self) -> bool:
        """Return whether some rank has poisoned the group."""
        return self._control.poisoner() is not None

    def poison(self, reason: str) -> None:
        """Mark the group as broken with `reason` and wake every sleeper. The first caller's mark stays."""
        if self.is_poisoned():
            return
        self._control.set_reason(reason)
        self._full_fence()
        self._control.set_poison()
        self.wake_all()

    def is_alone(self) -> bool:
        """Return whether every other rank has let go of this one's memory or ended."""
        others = (rank for rank in range(self._control.num_ranks) if rank != self._control.rank)
        return all(self._control.has_let_go(rank) or not self.peers[rank].is_alive() for rank in others)

    def wake_all(self) -> None:
        """Wake the sleepers on every rank's counter, so that they look at poison and closed marks."""
        self._full_fence()
        for index in self._counters:
            self._futex.wake(index * 8)
