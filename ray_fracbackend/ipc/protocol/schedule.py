"""The slot protocol: which rank may touch which memory when. Pure; imports the standard library only.

A rank runs a collective as a sequence of actions. Each belongs to a *step*; steps go on counting from one collective
to the next, and every step has one PUBLISH and one AWAIT. Memory of step ``s`` is the one of parity ``s & 1``:

* slots: written by their owner in PUT of step ``s``, read by others between AWAIT of ``s`` and the reader's next
  PUBLISH (in two passes: until FOLD of step ``s + 1``, which is before that PUBLISH too);
* folded: written by their owner in FOLD of step ``s``, read by others in TAKE of step ``s``;
* descriptions: as slots, written in SIGN and read in CHECK.

Why two of each are enough: a rank writes memory of step ``s + 2`` only after AWAIT of ``s + 1``, so all ranks have
published ``s + 1``, and each rank's reads of step ``s`` come before its PUBLISH of ``s + 1``. The same argument covers
events in a ring of two: no rank records event ``s + 2`` before all have waited for ``s``. tests/ipc drives these very
sequences through every interleaving of small cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache


class Action(IntEnum):
    """One thing that a rank does."""

    SIGN = 0  # store the call's description
    PUT = 1  # copy a chunk of the input into this rank's slot
    FOLD = 2  # reduce this rank's share of a chunk from all slots
    PUBLISH = 3  # announce the step
    AWAIT = 4  # wait until all ranks have announced the step
    CHECK = 5  # compare descriptions
    TAKE = 6  # copy or reduce a chunk from other ranks' memory into the output


Entry = tuple[Action, int, int]


def one_pass(num_chunks: int) -> Iterator[Entry]:
    """Yield the actions of a collective in which each rank takes straight from the slots: one step a chunk.

    Args:
        num_chunks: At least 1.

    Yields:
        ``(action, chunk, step)``, steps counted from 0 at the start of the collective.
    """
    yield Action.SIGN, 0, 0
    for chunk in range(num_chunks):
        yield Action.PUT, chunk, chunk
        yield Action.PUBLISH, chunk, chunk
        yield Action.AWAIT, chunk, chunk
        if chunk == 0:
            yield Action.CHECK, 0, 0
        yield Action.TAKE, chunk, chunk


def two_pass(num_chunks: int) -> Iterator[Entry]:
    """Yield the actions of a reduction that some ranks fold: chunk ``k`` is put in step k, folded and taken in k + 1.

    Args:
        num_chunks: At least 1.

    Yields:
        ``(action, chunk, step)`` in ``num_chunks + 1`` steps. FOLD of step s reads the slots of step ``s - 1``.
    """
    yield Action.SIGN, 0, 0
    for step in range(num_chunks + 1):
        if step < num_chunks:
            yield Action.PUT, step, step
        if step > 0:
            yield Action.FOLD, step - 1, step
        yield Action.PUBLISH, step, step
        yield Action.AWAIT, step, step
        if step == 0:
            yield Action.CHECK, 0, 0
        else:
            yield Action.TAKE, step - 1, step


@lru_cache(maxsize=64)
def schedule(num_chunks: int, two_passes: bool) -> tuple[Entry, ...]:
    """Return the actions of `one_pass` or `two_pass`; the latest are kept for the next call."""
    return tuple(two_pass(num_chunks) if two_passes else one_pass(num_chunks))
