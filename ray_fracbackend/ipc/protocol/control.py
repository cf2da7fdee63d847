"""The control page: counters, call descriptions and failure marks that the ranks of one host share.

Used by every rank; imports only the errors' base class from torch. Layout (8-byte words, native order):

    words 0-1    token of the arena
    words 2-4    size and number of the slots, and the largest all_reduce in one pass, in bytes (see `setup`)
    word  8      poison: 0, or 1 + local rank of a rank that failed
    from word 16, one block of BLOCK_WORDS words per local rank:
      +0   counter: number of this rank's announcements; only this rank writes it and the next three (see `schedule`)
      +1   the last chunk that this rank has written
      +2   the last chunk that it has read
      +3   the last chunk that it is done with
      +4   closed: 1 once this rank has shut its group down, 2 if it may still use other ranks' device memory
      +5   bell: number of times that it has stored all of these; other ranks sleep on this word
      +8   sleepers: one byte for each rank (modulo 64), set by that rank while it may be sleeping on the bell
      +16  two call descriptions (of even and odd calls) of DESCRIPTION_BYTES
      +80  reason of this rank's failure, REASON_BYTES, zero-terminated UTF-8

The counters, the sleepers and the rest of a block are on separate cache lines (64 bytes).
"""

from __future__ import annotations

from ..host.arena import Arena

POISON_WORD = 8
_FIRST_BLOCK = 16
BLOCK_WORDS = 160
_CLOSED = 4
_BELL = 5
_SLEEPERS = 8
_SLEEPERS_BYTES = 64
_DESCRIPTIONS = 16
DESCRIPTION_BYTES = 256
_REASON = 80
REASON_BYTES = 640


def control_bytes(num_ranks: int) -> int:
    """Return the size in bytes of the control page for `num_ranks` local ranks, a multiple of 4096."""
    return -(-(_FIRST_BLOCK + num_ranks * BLOCK_WORDS) * 8 // 4096) * 4096


class ControlPage:
    """Typed access to the control page of one group on one host.

    Args:
        arena: The mapping; the page is at its start.
        rank: Local rank of this process.
        num_ranks: Number of local ranks.

    Attributes:
        words: The page as 8-byte integers, for the polling loop.
        counter_index: Index in `words` of each rank's counter; its three counts follow it.
        bell_index: Index in `words` of each rank's bell.
        sleepers: Indices of the words with the bytes of ranks that may be sleeping on this rank's bell.
    """

    def __init__(self, arena: Arena, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._bytes = memoryview(arena.memory)[: control_bytes(num_ranks)]
        self.words = self._bytes.cast("q")
        self.counter_index = [_FIRST_BLOCK + r * BLOCK_WORDS for r in range(num_ranks)]
        self.bell_index = [index + _BELL for index in self.counter_index]
        first = self.counter_index[rank] + _SLEEPERS
        self.sleepers = range(first, first + min(_SLEEPERS_BYTES, num_ranks + 7) // 8)
        self._described = [b"", b""]
        self._descriptions = [[self._description_slice(r, parity) for parity in (0, 1)] for r in range(num_ranks)]

    def _description_slice(self, rank: int, parity: int) -> memoryview:
        start = (self.counter_index[rank] + _DESCRIPTIONS) * 8 + parity * DESCRIPTION_BYTES
        return self._bytes[start : start + DESCRIPTION_BYTES]

    def set_asleep(self, peer: int, asleep: bool) -> None:
        """Set or clear this rank's sleep mark on a peer's bell. Beyond 64 local ranks a lost mark delays a wake-up by one slice."""
        self._bytes[(self.counter_index[peer] + _SLEEPERS) * 8 + self.rank % _SLEEPERS_BYTES] = asleep

    def describe(self, call: int, description: bytes) -> None:
        """Store this rank's description of the call with number `call`."""
        # The other ranks have most descriptions in their caches already: a call often repeats the last but one.
        if self._described[call & 1] != description:
            self._descriptions[self.rank][call & 1][:] = self._described[call & 1] = description

    def keys_of(self, rank: int, num_bytes: int) -> list[memoryview]:
        """Return the first bytes of a rank's two descriptions: of its even calls, and of its odd ones."""
        return [of_calls[:num_bytes] for of_calls in self._descriptions[rank]]

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
        """Return the local rank that poisoned the group, or None."""
        value = self.words[POISON_WORD]
        return value - 1 if value else None

    def set_poison(self) -> None:
        """Mark the group as broken by this rank; store the reason and call the fence first."""
        self.words[POISON_WORD] = self.rank + 1

    def set_reason(self, reason: str) -> None:
        """Store the reason with which peers will raise, truncated to fit."""
        data = reason.encode("utf-8", "replace")[: REASON_BYTES - 1]
        start = (self.counter_index[self.rank] + _REASON) * 8
        self._bytes[start : start + REASON_BYTES] = data.ljust(REASON_BYTES, b"\0")

    def reason(self, rank: int) -> str:
        """Return the reason that `rank` stored when it poisoned the group."""
        start = (self.counter_index[rank] + _REASON) * 8
        return bytes(self._bytes[start : start + REASON_BYTES]).split(b"\0", 1)[0].decode("utf-8", "replace")

    def set_closed(self, keeps_memory: bool) -> None:
        """Mark this rank as closed; `keeps_memory` means that it may still use other ranks' memory."""
        self.words[self.counter_index[self.rank] + _CLOSED] = 2 if keeps_memory else 1

    def is_closed(self, rank: int) -> bool:
        """Return whether `rank` has shut its group down."""
        return self.words[self.counter_index[rank] + _CLOSED] != 0

    def has_let_go(self, rank: int) -> bool:
        """Return whether `rank` has shut its group down and no longer uses other ranks' memory."""
        return self.words[self.counter_index[rank] + _CLOSED] == 1
