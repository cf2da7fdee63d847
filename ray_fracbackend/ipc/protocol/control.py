"""The control page: counters, call descriptions and failure marks that the ranks of one host share.

Runs in every rank; imports nothing of torch but the errors' base class. Layout (8-byte words, native order):

    words 0-1    token of the arena
    word  8      poison: 0, or 1 + local rank of a rank that failed
    from word 16, one block of BLOCK_WORDS words per local rank:
      +0   counter: how often this rank has announced something, and what (see `schedule`), written by it alone:
      +1   the last chunk that it has written
      +2   the last that it has read
      +3   the last that it is done with
      +4   closed: 1 once this rank has shut its group down, 2 if it may go on using the others' device memory
      +5   bell: how often it has stored all of these; the word that others sleep on
      +8   sleepers: a byte for each rank (modulo 64), which it sets while it may be sleeping on the bell
      +16  two call descriptions (of even and odd calls) of DESCRIPTION_BYTES
      +80  reason of this rank's failure, REASON_BYTES, zero-terminated UTF-8
      +160 where this rank has put its last chunks: a byte for each, of its slots and of its folded areas (see `host.memory`)

A counter, the sleepers and the rest of a block have cache lines (64 bytes) of their own.
"""

from __future__ import annotations

from ..host.arena import Arena
from ..host.memory import MAX_PLACES

_POISON_WORD = 8
_FIRST_BLOCK = 16
BLOCK_WORDS = 176
_CLOSED = 4
_BELL = 5
_SLEEPERS = 8
_SLEEPERS_BYTES = 64
_DESCRIPTIONS = 16
DESCRIPTION_BYTES = 256
_REASON = 80
REASON_BYTES = 640
_PLACES = 160


def control_bytes(num_ranks: int) -> int:
    """Return the bytes that the control page of `num_ranks` local ranks takes, a multiple of 4096."""
    return -(-(_FIRST_BLOCK + num_ranks * BLOCK_WORDS) * 8 // 4096) * 4096


class ControlPage:
    """Typed access to the control page of one group on one host.

    Args:
        arena: The mapping; the page is at its start.
        rank: Local rank of this process.
        num_ranks: Local ranks.

    Attributes:
        words: The page as 8-byte integers, for the polling loop.
        counter_index: Index in `words` of each rank's counter, which what it counts follows.
        bell_index: Index in `words` of each rank's bell.
        places: Each rank's table of places.
    """

    def __init__(self, arena: Arena, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._bytes = memoryview(arena.memory)[: control_bytes(num_ranks)]
        self.words = self._bytes.cast("q")
        self.counter_index = [_FIRST_BLOCK + r * BLOCK_WORDS for r in range(num_ranks)]
        self.bell_index = [index + _BELL for index in self.counter_index]
        starts = [(index + _PLACES) * 8 for index in self.counter_index]
        self.places = [self._bytes[start : start + 2 * MAX_PLACES] for start in starts]
        # Words of those that may sleep on this rank's bell.
        first = self.counter_index[rank] + _SLEEPERS
        self._sleepers = range(first, first + min(_SLEEPERS_BYTES, num_ranks + 7) // 8)
        self._descriptions = [[self._description_slice(r, parity) for parity in (0, 1)] for r in range(num_ranks)]

    def _description_slice(self, rank: int, parity: int) -> memoryview:
        start = (self.counter_index[rank] + _DESCRIPTIONS) * 8 + parity * DESCRIPTION_BYTES
        return self._bytes[start : start + DESCRIPTION_BYTES]

    def set_asleep(self, peer: int, asleep: bool) -> None:
        """Mark this rank as one that may sleep on a peer's bell, or as awake. Nobody else writes this byte: no mark gets lost."""
        self._bytes[(self.counter_index[peer] + _SLEEPERS) * 8 + self.rank % _SLEEPERS_BYTES] = asleep

    def has_sleepers(self) -> bool:
        """Return whether a rank may be sleeping on this rank's bell."""
        for index in self._sleepers:  # noqa: SIM110 (a generator costs more than the look)
            if self.words[index]:
                return True
        return False

    def describe(self, call: int, description: bytes) -> None:
        """Store this rank's description of a call, by its number."""
        self._descriptions[self.rank][call & 1][:] = description

    def description(self, rank: int, call: int) -> bytes:
        """Return the description that `rank` stored for a call."""
        return bytes(self._descriptions[rank][call & 1])

    def find_difference(self, call: int, description: bytes, key_bytes: int) -> int | None:
        """Return the lowest rank whose description differs from `description` in its first `key_bytes`, or None."""
        key = description[:key_bytes]
        for rank, slices in enumerate(self._descriptions):
            if rank != self.rank and slices[call & 1][:key_bytes] != key:
                return rank
        return None

    def poisoner(self) -> int | None:
        """Return the local rank of a rank that poisoned the group, or None."""
        value = self.words[_POISON_WORD]
        return value - 1 if value else None

    def set_poison(self) -> None:
        """Mark the group as broken by this rank; its reason must be stored and fenced before."""
        self.words[_POISON_WORD] = self.rank + 1

    def set_reason(self, reason: str) -> None:
        """Store the text that peers will raise, cut to fit."""
        data = reason.encode("utf-8", "replace")[: REASON_BYTES - 1]
        start = (self.counter_index[self.rank] + _REASON) * 8
        self._bytes[start : start + REASON_BYTES] = data.ljust(REASON_BYTES, b"\0")

    def reason(self, rank: int) -> str:
        """Return the text that `rank` stored with its poison."""
        start = (self.counter_index[rank] + _REASON) * 8
        return bytes(self._bytes[start : start + REASON_BYTES]).split(b"\0", 1)[0].decode("utf-8", "replace")

    def set_closed(self, keeps_memory: bool) -> None:
        """Mark this rank as taking part in no further step; `keeps_memory` says that it may still use the others' memory."""
        self.words[self.counter_index[self.rank] + _CLOSED] = 2 if keeps_memory else 1

    def is_closed(self, rank: int) -> bool:
        """Return whether `rank` has shut its group down."""
        return self.words[self.counter_index[rank] + _CLOSED] != 0

    def has_let_go(self, rank: int) -> bool:
        """Return whether `rank` has, and uses no other rank's memory any more."""
        return self.words[self.counter_index[rank] + _CLOSED] == 1
