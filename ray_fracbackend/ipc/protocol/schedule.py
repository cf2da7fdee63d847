"""The slot protocol: what a rank does next, by how far the others are. Pure; imports the standard library only.

A collective moves its tensors in chunks, which are numbered on from one collective to the next. Chunk ``c`` goes through slot and folded
area ``c % num_slots`` of every rank. Each rank counts three things, each up to the last chunk for which it is true:

* WRITTEN: its part is in its slot;
* READ: it has read what it reads of the slots, and written what it folds of them;
* DONE: it has read what it reads of the folded areas, and does not need the chunk any more.

What a rank has no part in, as the receivers of a broadcast in writing, it counts for the whole collective at its beginning. Then

* PUT of ``c`` waits until all ranks have READ ``c - num_slots``;
* FOLD of ``c`` until all have WRITTEN ``c``, and are DONE with ``c - num_slots``;
* TAKE of ``c`` until all have WRITTEN it; in two passes, READ it, which says that it is folded;
* the end of the collective until all have WRITTEN its first chunk. So no rank ends a collective before all have begun it, and two
  descriptions a rank are enough. They are compared at the first FOLD or TAKE, or at the end.

Of what it may do a rank does the last of TAKE, FOLD and PUT: on a quiet machine each chunk is used while it is in the caches, and where
a peer is late a rank goes on with later chunks, as long as there are slots. A rank that can do nothing waits for what its lowest chunk lacks.
The last TAKE of a collective a rank announces with the first announcement of its next one, for which alone it matters: with two slots
or more nobody waits for it before.
That always comes: of all ranks the one with the lowest chunk, at the earliest action, waits for nobody. tests/ipc drives these very
decisions through every interleaving of small cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Action(IntEnum):
    """One thing that a rank does."""

    SIGN = 0  # store the call's description
    PUT = 1  # copy a chunk of the input into this rank's slot
    FOLD = 2  # reduce this rank's share of a chunk from all slots
    PUBLISH = 3  # announce how far this rank is
    AWAIT = 4  # wait for another rank
    CHECK = 5  # compare descriptions
    TAKE = 6  # copy or reduce a chunk from other ranks' memory into the output


# What a rank counts, in the order of its words: the number of its announcements, then the three above.
NUM_COUNTS = 4
PROGRESS, WRITTEN, READ, DONE = range(NUM_COUNTS)

_PUT, _FOLD, _AWAIT, _TAKE = Action.PUT, Action.FOLD, Action.AWAIT, Action.TAKE


class Course:
    """How far one rank is in a collective.

    Args:
        first: Number of the first chunk.
        num_chunks: At least 1.
        num_slots: Slots of each rank.
        two_passes: Whether some ranks fold.
        puts: Whether this rank sends anything.
        folds: Whether this rank folds.
        takes: Whether this rank receives anything.

    Attributes:
        written: The last chunk that this rank has written.
        read: The last that it has read.
        done: The last chunk that it does not need any more.
        chunk: Of the action that `next` has returned.
        peer: Whom to wait for where that is AWAIT.
        kind: For which count.
        value: For which value of it.
        stage: What all ranks have to have counted of a chunk before it is taken.
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
        """Return what this rank does next; None at the end.

        Args:
            words: Of all ranks, as they are now.
            peers: Each other rank, with the index of its words.
        """
        last, written, read, done = self.last, self.written, self.read, self.done
        # In one function, though long: a small collective has little time to spare for calls.
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
            # Its own slot, too, a rank reads before it writes it again.
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
        """Return whether this rank has written, read and taken all that it has to."""
        return self.done == self.last == self.written == self.read

    def lags(self, words: Sequence[int], peers: Sequence[tuple[int, int]]) -> bool:
        """Return whether an earlier chunk than the one to PUT waits for another rank; if so, `peer`, `kind` and `value` say for what.

        A moment's wait for it is better than to go on: a chunk in the caches is used first, and fewer slots are.
        """
        if self.written < self.first or self.done >= self.written:
            return False
        chunk = self.chunk
        self._blocked(words, peers)
        self.chunk = chunk
        return True

    def _blocked(self, words: Sequence[int], peers: Sequence[tuple[int, int]]) -> Action | None:
        """Return AWAIT for what the lowest chunk lacks, None where there is none."""
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

    def least(self, words: Sequence[int], peers: Sequence[tuple[int, int]], kind: int) -> int:
        """Return the last chunk that all ranks have READ, or are DONE with."""
        value = self.read if kind == READ else self.done
        for _, index in peers:
            count = words[index + kind]
            if count < value:
                value = count
        return value

    def after(self, action: Action) -> None:
        """Count what `next` has returned and this rank has done."""
        if action is _PUT:
            self.written = self.chunk
        elif action is _FOLD:
            self.read = self.chunk
        elif action is _TAKE:
            self.done = self.chunk
            if not self.two_passes:
                self.read = self.chunk
