"""Announce this rank's counts and wait for the counts of peers: poll, then sleep, with checks for failures.

A waiter polls the peer's count for a short, adaptive time. Then it sleeps on the peer's bell with a futex. At intervals
it checks the poison word, the deadline and the peer's process. It is not an error if a peer died or left after it
published its count: its memory is still mapped.
"""

from __future__ import annotations

import math
import os
import time

from .. import knobs
from ..errors import CollectiveMismatchError, CollectiveTimeoutError, GroupPoisonedError, PeerLostError
from ..host.atomics import Futex, let_threads_run, make_fence
from ..host.liveness import Peer
from .control import ControlPage
from .description import description_text
from .schedule import DONE, READ, WRITTEN

# Polls before the first system call: enough for a peer that runs at the same time.
_BARE_POLLS = 64
_POLLS_PER_YIELD = 16
# Longest sleep without checking the deadline and the peers' processes.
_SLICE_S = 0.05
_MIN_SPIN_US = 5
# A longer yield means that a process that is not a rank has used the core.
_STRANGER_S = 0.001
_MIN_UNYIELDING, _MAX_UNYIELDING = 16, 1024
# A wait, with its wake-up, of up to this multiple of the longest poll counts as one that polling could have avoided.
_NEAR_MISS = 1.5


class Waiter:
    """One rank's access to the counters of a host.

    Args:
        control: The control page.
        address: Address of its mapping.
        peers: Processes of the local ranks, by local rank.
        names: Name of each local rank in messages, such as "rank 3".

    Attributes:
        peers: See above.
        other_memory: This rank's waiter for the group's other kind of memory, which has a control page of its own; None until
            it exists.
        num_calls: Number of calls that this rank has begun with this memory.
        num_published: Number of its announcements.
        bare_polls: Number of polls before the first system call.
    """

    def __init__(self, control: ControlPage, address: int, peers: list[Peer], names: list[str]) -> None:
        self._fence = make_fence()
        self.other_memory: Waiter | None = None
        self.num_calls = 0
        self.num_published = 0
        self._control = control
        self._words = control.words
        self._counters = control.counter_index
        self._bells = control.bell_index
        self._futex = Futex(address)
        self.peers = peers
        self._names = names
        self._own = control.counter_index[control.rank]
        self._own_bell = control.bell_index[control.rank]
        self._sleepers = control.sleepers
        num_cores = len(os.sched_getaffinity(0))
        self._max_spin_us = float(knobs.spin_us())
        # With more ranks than cores, polling slows down the rank that it waits for: yield at once.
        self._is_crowded = control.num_ranks > num_cores
        self.bare_polls = 1 if self._is_crowded else _BARE_POLLS
        # Number of waits without a yield: remaining now, and after the next yield that costs a time slice.
        self._unyielding, self._next_unyielding = 0, _MIN_UNYIELDING
        self._let_threads_run = let_threads_run()
        self._spin_us = self._max_spin_us

    def publish(self, written: int, read: int, done: int) -> None:
        """Announce the last chunk that this rank has written, read and is done with; wake sleeping peers."""
        words, own = self._words, self._own
        # First: a peer that sees the counts below also sees this counter or a later one.
        words[own] = self.num_published = progress = self.num_published + 1
        words[own + WRITTEN] = written
        words[own + READ] = read
        words[own + DONE] = done
        # Last: a peer that missed the counts above has read an older bell, so it does not fall asleep.
        words[self._own_bell] = progress
        self._fence()
        for index in self._sleepers:
            if words[index]:
                self._futex.wake(self._own_bell * 8)
                break

    def wait(self, peer: int, kind: int, value: int, deadline: float, what: str) -> None:
        """Return once the count `kind` of local rank `peer` is at least `value`.

        Args:
            peer: Local rank.
            kind: The count, see `schedule`.
            value: Number of a chunk.
            deadline: `time.monotonic` value after which to raise.
            what: Description of the call, for messages.

        Raises:
            GroupPoisonedError: A rank has failed.
            PeerLostError: The peer's process has ended, or the peer has shut its group down.
            CollectiveTimeoutError: The deadline has passed.
        """
        words, index = self._words, self._counters[peer] + kind
        if words[index] >= value:
            return
        for _ in range(self.bare_polls):
            if words[index] >= value:
                return
        started = time.monotonic()
        if not self._spin(index, value, started + self._spin_us * 1e-6):
            self._sleep(peer, kind, value, deadline, what)
            self._adapt(time.monotonic() - started)

    def poll(self, peer: int, kind: int, value: int) -> bool:
        """Return whether the count of `peer` reaches `value` within the time that `wait` polls."""
        words, index = self._words, self._counters[peer] + kind
        for _ in range(self.bare_polls):
            if words[index] >= value:
                return True
        if self._spin(index, value, time.monotonic() + self._spin_us * 1e-6):
            return True
        self._adapt(math.inf)
        return False

    def _spin(self, index: int, value: int, end: float) -> bool:
        words, yields = self._words, self._unyielding == 0
        if not yields:
            self._unyielding -= 1
        while True:
            for _ in range(_POLLS_PER_YIELD):
                if words[index] >= value:
                    return True
            now = time.monotonic()
            if now >= end:
                return False
            if not yields:
                self._let_threads_run()
            else:
                os.sched_yield()
                if not self._is_crowded and time.monotonic() - now > _STRANGER_S:
                    # An unrelated process ran in this time; a peer would have returned sooner.
                    self._unyielding = self._next_unyielding
                    self._next_unyielding = min(2 * self._next_unyielding, _MAX_UNYIELDING)
                    yields = False

    def _adapt(self, waited_s: float) -> None:
        """Poll for the full time if that would nearly have sufficed; otherwise halve the time."""
        if waited_s <= self._max_spin_us * _NEAR_MISS * 1e-6:
            self._spin_us = self._max_spin_us
        else:
            self._spin_us = max(self._spin_us / 2, min(_MIN_SPIN_US, self._max_spin_us))

    def _sleep(self, peer: int, kind: int, value: int, deadline: float, what: str) -> None:
        words, index, bell = self._words, self._counters[peer] + kind, self._bells[peer]
        while True:
            seen = words[bell]
            if words[index] >= value:
                return
            self._raise_if_hopeless(peer, kind, value, deadline, what)
            self._control.set_asleep(peer, True)
            try:
                self._fence()
                if words[bell] == seen and self._control.poisoner() is None:
                    self._futex.wait(bell * 8, seen, max(0.0, min(_SLICE_S, deadline - time.monotonic())))
            finally:
                self._control.set_asleep(peer, False)

    def _raise_if_hopeless(self, peer: int, kind: int, value: int, deadline: float, what: str) -> None:
        self.raise_if_poisoned(what)
        # Check every rank that is still missing, not only the one that is waited for first.
        for rank in range(self._control.num_ranks):
            if self._words[self._counters[rank] + kind] < value and rank != self._control.rank:
                self._raise_if_gone(rank, kind, value, what)
                self._raise_if_beside(rank, kind, value, what)
        if time.monotonic() >= deadline and self._words[self._counters[peer] + kind] < value:
            rank = self._behind(peer)
            process = self.peers[rank]
            raise CollectiveTimeoutError(
                f"{self._names[rank]} (pid {process.pid}, {process.state()}) did not reach {what} in time: the call "
                "timed out. Look there first, or raise the timeout of the group."
            )

    def _behind(self, peer: int) -> int:
        """Return the rank to name in a timeout: `peer` may itself wait for a rank that is stopped or further behind."""
        others = [peer, *(rank for rank in range(self._control.num_ranks) if rank not in (peer, self._control.rank))]
        stopped = [rank for rank in others if self.peers[rank].state() == "stopped"]
        return min(stopped or others, key=self._position)

    def _position(self, rank: int) -> int:
        """Return the last chunk that a rank has announced as written, read and done."""
        index = self._counters[rank]
        return min(self._words[index + kind] for kind in (WRITTEN, READ, DONE))

    def _raise_if_gone(self, rank: int, kind: int, value: int, what: str) -> None:
        # In this order: a process sets its closed mark before it ends.
        alive, closed = self.peers[rank].is_alive(), self._control.is_closed(rank)
        if alive and not closed:
            return
        # It may have reached the value and left since its count was read.
        if self._words[self._counters[rank] + kind] >= value:
            return
        # Or it failed, stored its reason and left: the reason is more useful than the loss.
        self.raise_if_poisoned(what)
        if alive:
            raise PeerLostError(f"{self._names[rank]} shut its process group down before it reached {what}.")
        raise PeerLostError(f"{self._names[rank]} (pid {self.peers[rank].pid}) died before it reached {what}.")

    def _raise_if_beside(self, rank: int, kind: int, value: int, what: str) -> None:
        """Raise if a peer is ahead in the other memory: all ranks call in one order, so it will not make this call."""
        there = self.other_memory
        if there is None:
            return
        # Between calls the WRITTEN counts of all ranks are equal.
        if there._words[there._counters[rank] + WRITTEN] <= there._words[there._own + WRITTEN]:
            return
        # It may have made this call first and then continued in the other memory.
        if self._words[self._counters[rank] + kind] >= value:
            return
        call = description_text(there._control.description(rank, there.num_calls + 1))
        raise CollectiveMismatchError(
            f"{self._names[self._control.rank]} called {what} while {self._names[rank]} called {call} for the same "
            f"collective of the group, with tensors of another device; all ranks must make the same calls in the same "
            f"order, on the same type of device."
        )

    def raise_if_poisoned(self, what: str) -> None:
        """Raise the reason with which a rank poisoned the group, in this memory or in the other one.

        Raises:
            GroupPoisonedError: The group is poisoned.
        """
        for waiter in (self, self.other_memory):
            if waiter is not None and (culprit := waiter._control.poisoner()) is not None:
                raise GroupPoisonedError(
                    f"{what}: {self._names[culprit]} failed and the process group cannot be used any more. "
                    f"Reason: {waiter._control.reason(culprit)}"
                )

    def is_poisoned(self) -> bool:
        """Return whether any rank has poisoned the group."""
        return self._control.poisoner() is not None

    def poison(self, reason: str) -> None:
        """Mark the group as broken with `reason` and wake every sleeper. An existing mark is kept."""
        if self.is_poisoned():
            return
        self._control.set_reason(reason)
        self._fence()
        self._control.set_poison()
        self.wake_all()

    def have_all_let_go(self) -> bool:
        """Return whether every other rank has released this rank's memory or ended."""
        others = (rank for rank in range(self._control.num_ranks) if rank != self._control.rank)
        return all(self._control.has_let_go(rank) or not self.peers[rank].is_alive() for rank in others)

    def wake_all(self) -> None:
        """Wake the sleepers on every rank's bell, to check the poison and closed marks."""
        self._fence()
        for index in self._bells:
            self._futex.wake(index * 8)
