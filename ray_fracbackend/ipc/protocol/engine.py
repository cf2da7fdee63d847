"""Run collectives of one host, one at a time: schedule, steps, mismatch detection, failure. Imports torch.

Nothing here knows which memory the tensors pass through; that is the transport's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CollectiveMismatchError, GroupClosedError, IpcError
from ..host.arena import Arena
from ..host.liveness import Peer
from ..host.memory import SlotMemory
from .control import ControlPage
from .description import KEY_BYTES, Terms, description_text
from .schedule import Action, schedule
from .waiting import Waiter

# Looking an enum's member up costs as much as comparing it, and there are several of both per call.
_SIGN, _PUT, _FOLD, _PUBLISH, _AWAIT, _CHECK, _TAKE = Action

ChunkFunction = Callable[[int, int], None]


@dataclass(slots=True)
class Call:
    """One collective, ready to run.

    Attributes:
        terms: What the ranks agree on, and the deadline.
        num_chunks: Chunks, at least 1 and equal on all ranks.
        put: ``put(chunk, step)`` fills this rank's slot of `step`; None if this rank sends nothing.
        take: ``take(chunk, step)`` reads other ranks' memory of `step`; None if this rank receives nothing.
        fold: ``fold(chunk, step)`` reduces this rank's share from the slots of ``step - 1`` into its folded memory of
            `step`; None for a collective in one pass.
    """

    terms: Terms
    num_chunks: int
    put: ChunkFunction | None
    take: ChunkFunction | None
    fold: ChunkFunction | None = None


class Engine:
    """One rank's side of the collectives of a host.

    Args:
        arena: Begins with the control page.
        rank: Local rank of this process.
        peers: Processes of the local ranks.
        names: How messages call each local rank.
        transport: The memory for tensors.

    Attributes:
        waiter: Publishes and waits for steps.
        observer: Called as ``observer(action, chunk)`` before each action; for tests that inject failures.
        on_failure: Called with the reason after a call has failed here, to inform ranks that this page does not reach.
        has_raised: Whether a call of this process has reported that the group is broken.
    """

    def __init__(self, arena: Arena, rank: int, peers: list[Peer], names: list[str], transport: SlotMemory) -> None:
        self.rank = rank
        self.num_ranks = len(peers)
        self.transport = transport
        self.observer: Callable[[Action, int], None] | None = None
        self.on_failure: list[Callable[[str], None]] = []
        self.has_raised = False
        self._control = ControlPage(arena, rank, len(peers))
        self.waiter = Waiter(self._control, arena.address, peers, names)
        self._names = names
        self._peers = [(rank + i) % len(peers) for i in range(1, len(peers))]
        self._step = 0
        self._closed = False

    def run(self, call: Call) -> None:
        """Run one collective; block until this rank's part is done.

        Raises:
            IpcError: This or another rank failed; the group cannot be used any more.
        """
        what = description_text(call.terms.description)
        if self._closed:
            raise _closed_error(what)
        try:
            self.waiter.raise_if_poisoned(what)
            self._run_actions(call, what)
        except BaseException as error:
            # Whatever stopped this rank, it is out of step with the others now: they must not wait for it.
            self.has_raised = True
            self.fail(str(error) if isinstance(error, IpcError) else f"{type(error).__name__}: {error} in {what}")
            raise

    def _run_actions(self, call: Call, what: str) -> None:
        first, deadline = self._step + 1, call.terms.deadline
        transport, waiter, observer = self.transport, self.waiter, self.observer
        for action, chunk, offset in schedule(call.num_chunks, call.fold is not None):
            step = first + offset
            if observer is not None:
                observer(action, chunk)
            if action is _PUT:
                if call.put is not None:
                    call.put(chunk, step)
            elif action is _PUBLISH:
                transport.record(step)
                waiter.publish(step)
                self._step = step
            elif action is _AWAIT:
                for peer in self._peers:
                    waiter.wait(peer, step, deadline, what)
                    transport.wait(peer, step)
            elif action is _TAKE:
                if call.take is not None:
                    call.take(chunk, step)
            elif action is _FOLD:
                assert call.fold is not None
                call.fold(chunk, step)
            elif action is _SIGN:
                self._control.describe(step, call.terms.description)
            else:
                self._check(call.terms.description, step)

    def _check(self, description: bytes, step: int) -> None:
        peer = self._control.find_difference(step, description, KEY_BYTES)
        if peer is None:
            return
        theirs = description_text(self._control.description(peer, step))
        raise CollectiveMismatchError(
            f"{self._names[self.rank]} called {description_text(description)} while {self._names[peer]} called "
            f"{theirs} as the same collective of the group; every rank must make the same calls in the same order."
        )

    def raise_if_unusable(self, what: str) -> None:
        """Raise what a call would raise if this rank began it now.

        Raises:
            IpcError: The group was closed, or poisoned by some rank.
        """
        if self._closed:
            raise _closed_error(what)
        try:
            self.waiter.raise_if_poisoned(what)
        except IpcError:
            self.has_raised = True
            raise

    def has_left(self, rank: int) -> bool:
        """Return whether a local rank has closed its group in order."""
        return self._control.is_closed(rank)

    def fail(self, reason: str) -> None:
        """Poison the group: every rank raises with `reason`, unless another reason came first."""
        self.waiter.poison(reason)
        for notify in self.on_failure:
            notify(reason)

    def abort(self, reason: str) -> None:
        """Poison the group so that every rank raises, then close it. May be called again, from any thread."""
        if not self._closed:
            self.fail(reason)
        self.close(keeps_memory=True)

    def close(self, keeps_memory: bool = False) -> None:
        """Leave the group: peers that still wait for this rank raise. May be called again, from any thread.

        Args:
            keeps_memory: Whether this rank may still use the others' memory, which they then must not free.
        """
        if self._closed:
            return
        self._closed = True
        self._control.set_closed(keeps_memory)
        self.waiter.wake_all()


def _closed_error(what: str) -> GroupClosedError:
    return GroupClosedError(f"{what}: the process group was shut down or aborted; make a new one.")
