"""Run collectives of one host, one at a time: actions, mismatch detection, failure. Imports torch.

The engine does not depend on the memory of the tensors; the transport handles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import CollectiveMismatchError, GroupClosedError, IpcError
from ..host.arena import Arena
from ..host.liveness import Peer
from ..host.memory import SlotMemory
from .control import ControlPage
from .description import KEY_BYTES, Terms, description_text
from .schedule import DONE, WRITTEN, Action, Course
from .waiting import Waiter

# Bound once: looking up an enum member takes as long as comparing it, and a call does both several times.
_SIGN, _PUT, _FOLD, _PUBLISH, _AWAIT, _CHECK, _TAKE = Action

ChunkFunction = Callable[[int, int], None]


@dataclass(slots=True)
class Call:
    """One collective, ready to run.

    Attributes:
        terms: What the ranks agree on, and the deadline.
        num_chunks: Number of chunks, at least 1 and equal on all ranks.
        put: ``put(index, chunk)`` fills this rank's slot of the call's index-th chunk; None if this rank sends nothing.
        take: ``take(index, chunk)`` reads other ranks' memory of the chunk; None if this rank receives nothing.
        two_passes: Whether some ranks fold. All ranks read the folded areas.
        fold: ``fold(index, chunk)`` reduces this rank's share of the chunk, from all slots, into its folded area; None
            if this rank folds nothing.
        sources: Local ranks whose memory `take` reads; None for all.
        readers: Local ranks that read this rank's slot; None for all.
    """

    terms: Terms
    num_chunks: int
    put: ChunkFunction | None
    take: ChunkFunction | None
    two_passes: bool = False
    fold: ChunkFunction | None = None
    sources: Sequence[int] | None = None
    readers: Sequence[int] | None = None


class Engine:
    """One rank's side of the collectives of a host.

    Args:
        arena: Shared memory; the control page is at its start.
        rank: Local rank of this process.
        peers: Processes of the local ranks.
        names: Name of each local rank in messages.
        transport: The memory for tensors.

    Attributes:
        control: The control page.
        peers: The other local ranks, in the order in which this rank looks at them.
        last_chunk: Number of the last chunk of this rank's calls so far.
        waiter: Publishes this rank's counts and waits for the other ranks.
        observer: Called as ``observer(action, chunk)`` before each action; for tests that inject failures.
        on_failure: Called with the reason after a call has failed here, to inform ranks that do not share this page.
        on_raise: Called before a call of this process raises because the group is broken.
        is_closed: Whether this rank has left the group.
        has_raised: Whether a call of this process has reported that the group is broken.
    """

    def __init__(self, arena: Arena, rank: int, peers: list[Peer], names: list[str], transport: SlotMemory) -> None:
        self.rank = rank
        self.num_ranks = len(peers)
        self.transport = transport
        self.observer: Callable[[Action, int], None] | None = None
        self.on_failure: list[Callable[[str], None]] = []
        self.on_raise: list[Callable[[], None]] = []
        self.has_raised = False
        self.control = ControlPage(arena, rank, len(peers))
        self.waiter = Waiter(self.control, arena.address, peers, names)
        self._names = names
        self.peers = [(rank + i) % len(peers) for i in range(1, len(peers))]
        self._others = [(peer, self.control.counter_index[peer]) for peer in self.peers]
        transport.attach(self.control.words, self.control.counter_index)
        self.last_chunk = 0
        self.is_closed = False

    def run(self, call: Call) -> None:
        """Run one collective; block until this rank's part is done.

        Raises:
            IpcError: This or another rank failed; the group cannot be used any more.
        """
        what = description_text(call.terms.description)
        if self.is_closed:
            raise _closed_error(what)
        try:
            self.waiter.raise_if_poisoned(what)
            self._run_actions(call, what)
        except BaseException as error:
            self.failed(error, what)
            raise

    def failed(self, error: BaseException, what: str) -> None:
        """Poison the group after an error in a call: this rank is out of step, and the others must not wait for it."""
        self._raises()
        self.fail(str(error) if isinstance(error, IpcError) else f"{type(error).__name__}: {error} in {what}")

    def _run_actions(self, call: Call, what: str) -> None:
        transport, waiter, observer, put = self.transport, self.waiter, self.observer, call.put
        words, others, terms, is_checked = self.control.words, self._others, call.terms, False
        first = self.last_chunk + 1
        course = Course(
            first,
            call.num_chunks,
            transport.num_slots,
            call.two_passes,
            put is not None,
            call.fold is not None,
            call.take is not None,
        )
        waiter.num_calls += 1
        if observer is not None:
            observer(_SIGN, 0)
        self.control.describe(waiter.num_calls, terms.description)
        if put is None:
            self._publish(course)
        while True:
            action = course.next(words, others)
            chunk = course.chunk
            if action is _AWAIT:
                if observer is not None:
                    observer(action, chunk - first)
                waiter.wait(course.peer, course.kind, course.value, terms.deadline, what)
                continue
            if action is _PUT and course.lags(words, others) and waiter.poll(course.peer, course.kind, course.value):
                continue
            if action is _PUT:
                if observer is not None:
                    observer(action, chunk - first)
                assert put is not None
                readers = self.peers if call.readers is None else call.readers
                transport.prepare_put(chunk, readers)
                put(chunk - first, chunk)
                course.after(action)
                self._publish(course)
                continue
            if not is_checked:
                if observer is not None:
                    observer(_CHECK, 0)
                self.check(terms.description)
                is_checked = True
            if action is None:
                break
            if observer is not None:
                observer(action, chunk - first)
            if action is _FOLD:
                assert call.fold is not None
                transport.after(self.peers, WRITTEN, chunk)
                transport.after(self.peers, DONE, chunk - transport.num_slots)
                call.fold(chunk - first, chunk)
            else:
                assert call.take is not None
                transport.after(self.peers if call.sources is None else call.sources, course.stage, chunk)
                call.take(chunk - first, chunk)
            course.after(action)
            if action is _TAKE and course.is_over():
                break  # the next call announces this chunk
            self._publish(course)
        self.last_chunk = course.last

    def _publish(self, course: Course) -> None:
        if self.observer is not None:
            self.observer(_PUBLISH, course.chunk - course.first)
        self.transport.announce(self.waiter.num_published + 1)
        self.waiter.publish(course.written, course.read, course.done)

    def check(self, description: bytes) -> None:
        """Compare this rank's description of the current call with those of the other ranks.

        Raises:
            CollectiveMismatchError: One differs.
        """
        call = self.waiter.num_calls
        peer = self.control.find_difference(call, description, KEY_BYTES)
        if peer is None:
            return
        theirs = description_text(self.control.description(peer, call))
        raise CollectiveMismatchError(
            f"{self._names[self.rank]} called {description_text(description)} while {self._names[peer]} called "
            f"{theirs} for the same collective of the group; all ranks must make the same calls in the same order."
        )

    def raise_if_unusable(self, what: str) -> None:
        """Raise the error that a call would raise now, if the group is closed or broken.

        Raises:
            IpcError: The group was closed, or a rank poisoned it.
        """
        if self.is_closed:
            raise _closed_error(what)
        try:
            self.waiter.raise_if_poisoned(what)
        except IpcError:
            self._raises()
            raise

    def _raises(self) -> None:
        self.has_raised = True
        for notify in self.on_raise:
            notify()

    def has_left(self, rank: int) -> bool:
        """Return whether a local rank has closed its group."""
        return self.control.is_closed(rank)

    def fail(self, reason: str) -> None:
        """Poison the group: every rank raises with `reason`, or with an earlier one."""
        self.waiter.poison(reason)
        for notify in self.on_failure:
            notify(reason)

    def abort(self, reason: str) -> None:
        """Poison the group, so that every rank raises, then close it. May be called repeatedly and from any thread."""
        if not self.is_closed:
            self.fail(reason)
        self.close(keeps_memory=True)

    def close(self, keeps_memory: bool = False) -> None:
        """Leave the group: peers that still wait for this rank raise. May be called repeatedly and from any thread.

        Args:
            keeps_memory: Whether this rank may still use other ranks' memory; if so, they must not free it.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self.control.set_closed(keeps_memory)
        self.waiter.wake_all()


def _closed_error(what: str) -> GroupClosedError:
    return GroupClosedError(f"{what}: the process group was shut down or aborted; create a new one.")
