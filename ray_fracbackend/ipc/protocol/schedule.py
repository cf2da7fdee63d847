"""The slot protocol: the next action of a rank, given the progress of the others. Pure; standard library only.

A collective moves its tensors in chunks, whose numbers continue from one collective to the next. Chunk ``c`` uses slot and
folded area ``c % num_slots`` of every rank (see `host.memory`). Each rank has three counts, each
the last chunk for which this is true:

* WRITTEN: its part is in its slot;
* READ: it has read its data from the slots, and written its folded share;
* DONE: it has read its data from the folded areas, and does not need the chunk any more.

A step in which a rank has no part, such as writing for the receivers of a broadcast, counts as done from the start of
the collective. The rules:

* PUT of ``c`` waits until all ranks have READ ``c - num_slots``;
* FOLD of ``c`` waits until all have WRITTEN ``c``, and are DONE with ``c - num_slots``;
* TAKE of ``c`` waits until all have WRITTEN it; in two passes, until all have READ it: it is then folded;
* the end of the collective waits until all have WRITTEN its first chunk. No rank ends a collective before all have
  begun it, so two descriptions per rank are enough. They are compared at the first FOLD or TAKE, or at the end.

If several actions are possible, a rank prefers TAKE, then FOLD, then PUT: on an idle machine each chunk is used while
it is in the caches. If a peer is late, a rank continues with later chunks while slots are free; if it can do nothing,
it waits for what its lowest chunk needs. The last TAKE of a collective is announced with the next collective's first announcement, which is early enough with two
or more slots. Every wait ends: the rank with the lowest chunk, at the earliest action, waits for no other rank. tests/ipc
tests this code in every interleaving of small cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Action(IntEnum):
    """One action of a rank."""

    SIGN = 0  # store the call's description
    PUT = 1  # copy a chunk of the input into this rank's slot
    FOLD = 2  # reduce this rank's share of a chunk from all slots
    PUBLISH = 3  # announce this rank's counts
    AWAIT = 4  # wait for another rank
    CHECK = 5  # compare descriptions
    TAKE = 6  # copy or reduce a chunk from other ranks' memory into the output


# The counts of a rank, in the order of its words: the number of its announcements, then the three above.
NUM_COUNTS = 4
PROGRESS, WRITTEN, READ, DONE = range(NUM_COUNTS)

_PUT, _FOLD, _AWAIT, _TAKE = Action.PUT, Action.FOLD, Action.AWAIT, Action.TAKE


class Course:
    """Progress of one rank in a collective.

    Args:
        first: Number of the first chunk.
        num_chunks: Number of chunks, at least 1.
        num_slots: Number of slots of each rank.
        two_passes: Whether some ranks fold.
        puts: Whether this rank sends anything.
        folds: Whether this rank folds.
        takes: Whether this rank receives anything.

    Attributes:
        written: The last chunk that this rank has written.
        read: The last chunk that it has read.
        done: The last chunk that it does not need any more.
        chunk: Chunk of the action that `next` has returned.
        peer: For AWAIT, the rank to wait for.
        kind: For AWAIT, the count to wait for.
        value: For AWAIT, the value of that count.
        stage: The count that every rank must reach for a chunk before TAKE.
    """

    __slots__ = (
        "chunk", "done", "first", "kind", "last", "num_slots", "peer", "read", "stage", "two_passes", "value", "written",
    )  # fmt: skip

    def __init__(
        self, first: int, num_chunks: int, num_slots: int, two_passes: bool, puts: bool, folds: bool, takes: bool
    ) -> None:
        before = first - 1
        self.first = self.chunk = first
        self.last, self.num_slots = before + num_chunks, num_slots
        self.two_passes, self.stage = two_passes, READ if two_passes else WRITTEN
        self.written = before if puts else self.last
        self.read = before if (folds if two_passes else takes) else self.last
        self.done = before if takes else self.last

    def next(self, words: Sequence[int], peers: Sequence[tuple[int, int]]) -> Action | None:
        """Return this rank's next action, or None at the end.

        Args:
            words: Current words of all ranks.
            peers: Each other rank, with the index of its counts in `words`.
        """
        last, written, read, done = self.last, self.written, self.read, self.done
        # One long function, because function calls would slow down a small collective.
        if done < last:
            chunk = done + 1
            if written >= chunk and (not self.two_passes or read >= chunk):
                stage = self.stage
                for _, index in peers:
                    if words[index + stage] < chunk:
                        break
                else:
                    self.chunk = chunk
                    return _TAKE
        if read < last and self.two_passes:
            chunk, old = read + 1, read + 1 - self.num_slots
            if written >= chunk and done >= old:
                for _, index in peers:
                    if words[index + WRITTEN] < chunk or words[index + DONE] < old:
                        break
                else:
                    self.chunk = chunk
                    return _FOLD
        if written < last:
            # A rank also reads its own slot before it overwrites it.
            old = written + 1 - self.num_slots
            if read >= old:
                for _, index in peers:
                    if words[index + READ] < old:
                        break
                else:
                    self.chunk = written + 1
                    return _PUT
        return self._blocked(words, peers)

    def is_over(self) -> bool:
        """Return whether this rank has written, read and taken all its chunks."""
        return self.done == self.last == self.written == self.read

    def lags(self, words: Sequence[int], peers: Sequence[tuple[int, int]]) -> bool:
        """Return whether a chunk before the one to PUT waits for another rank; if so, set `peer`, `kind` and `value`.

        A short wait is better than continuing: it uses a chunk that is in the caches, and fewer slots.
        """
        if self.written < self.first or self.done >= self.written:
            return False
        chunk = self.chunk
        self._blocked(words, peers)
        self.chunk = chunk
        return True

    def _blocked(self, words: Sequence[int], peers: Sequence[tuple[int, int]]) -> Action | None:
        """Return AWAIT for what the lowest chunk needs, or None if the collective is complete."""
        if self.done < self.last:
            chunk = self.done + 1
            if self.written >= chunk and (not self.two_passes or self.read >= chunk):
                return self._await(words, peers, self.stage, chunk)
        if self.read < self.last and self.two_passes and self.read < self.written:
            chunk = self.read + 1
            if any(words[index + WRITTEN] < chunk for _, index in peers):
                return self._await(words, peers, WRITTEN, chunk)
            return self._await(words, peers, DONE, chunk - self.num_slots)
        if self.written < self.last:
            return self._await(words, peers, READ, self.written + 1 - self.num_slots)
        if any(words[index + WRITTEN] < self.first for _, index in peers):
            return self._await(words, peers, WRITTEN, self.first)
        return None

    def _await(self, words: Sequence[int], peers: Sequence[tuple[int, int]], kind: int, value: int) -> Action:
        self.peer = next((rank for rank, index in peers if words[index + kind] < value), peers[0][0])
        self.kind, self.value, self.chunk = kind, value, max(value, self.first)
        return _AWAIT

    def after(self, action: Action) -> None:
        """Update the counts after this rank has performed the action that `next` returned."""
        if action is _PUT:
            self.written = self.chunk
        elif action is _FOLD:
            self.read = self.chunk
        elif action is _TAKE:
            self.done = self.chunk
            if not self.two_passes:
                self.read = self.chunk
