"""Model of the slot protocol: every interleaving of small cases with fake memory and fake words.

`ray_fracbackend.ipc.protocol.schedule` itself decides the next action of a rank, and `ray_fracbackend.ipc.device.memory` the ranks for which its stream waits. Each rank has a host and a stream. The host issues one action
after the other and announces it. The stream copies, writes its word and waits for the words of others, in the order in which the host
issued this, at any later time (device memory) or at once (host memory).

A write consists of two micro-steps. A read is one: it stands for any moment of a real read. It is an error to read memory that is being
written, or memory of another chunk than intended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_fracbackend.ipc.device.driver import DeviceBlock
from ray_fracbackend.ipc.device.memory import NUM_SLOTS, DeviceMemory, block_bytes
from ray_fracbackend.ipc.protocol.schedule import DONE, NUM_COUNTS, WRITTEN, Action, Course

TORN = -1


class ProtocolViolation(AssertionError):
    """An interleaving in which a rank reads the wrong bytes, or that does not end."""


@dataclass(frozen=True)
class Rules:
    """Parameters of the protocol; the defaults are the real ones, others must be detected as wrong."""

    buffers: int = NUM_SLOTS
    publish_before_put: bool = False
    publish_before_fold: bool = False
    skip_await: bool = False
    skip_wait: bool = False
    wait_for_less: bool = False
    skip_wait_to_write: bool = False
    record_before_put: bool = False
    count_before_progress: bool = False
    never_announces_a_take: bool = False


# Kind of a collective: in one pass, all to all; in two passes, in which every rank folds its share, or rank 0 folds all; in one pass to
# rank 0, or from it.
ONE, SPLIT, LEADER, TO_ROOT, FROM_ROOT = "one pass", "split", "leader", "to root", "from root"
Micro = tuple[str, Any]
# State of a rank's host: its call, what it has written, read and finished of it, whether it has checked, and what it must still announce.
Host = tuple[int, int, int, int, bool, Any]
_CHUNK_BYTES = 64


class Waits(DeviceMemory):
    """The real waits of a rank's stream, from a state and into a list."""

    def __init__(self, rank: int, num_ranks: int, rules: Rules) -> None:
        data = torch.empty(block_bytes(_CHUNK_BYTES, num_ranks)[0], dtype=torch.uint8)
        self.into = Words(rules)
        super().__init__(DeviceBlock(0, False, data), self.into, _CHUNK_BYTES, rank, num_ranks)  # type: ignore[arg-type]
        self.rules = rules

    def resume(self, words: Sequence[int], state: Any, found: list[Micro]) -> None:
        reached, readers = state
        self.attach(words, [r * NUM_COUNTS for r in range(len(reached))])
        self._reached, self._readers, self.into.found = [list(counts) for counts in reached], list(readers), found

    def prepare_put(self, chunk: int, readers: Sequence[int]) -> None:
        """Like the real one, or without a wait."""
        if not self.rules.skip_wait_to_write:
            super().prepare_put(chunk, readers)

    def state(self) -> Any:
        """Return the state that the next wait depends on."""
        return tuple(map(tuple, self._reached)), tuple(map(tuple, self._readers))


class HostAreas:
    """In host memory the stream needs no waits."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def resume(self, words: Sequence[int], state: Any, found: list[Micro]) -> None:
        """Do nothing."""

    def after(self, ranks: Sequence[int], kind: int, value: int) -> None:
        """Do nothing."""

    def prepare_put(self, chunk: int, readers: Sequence[int]) -> None:
        """Do nothing."""

    def state(self) -> Any:
        """Return nothing."""
        return ()


class Words:
    """The words that `Timeline` would issue."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.found: list[Micro] = []

    def wait(self, steps: Mapping[int, int]) -> None:
        if not self.rules.skip_wait:
            self.found += [("wait", (writer, step - self.rules.wait_for_less)) for writer, step in steps.items()]


class Explorer:
    """Visits all interleavings of `num_ranks` ranks that run the same calls.

    Args:
        num_ranks: Number of ranks.
        calls: ``(num_chunks, kind)`` of each collective.
        device: Whether streams run later than hosts.
        rules: Protocol parameters.
    """

    def __init__(self, num_ranks: int, calls: list[tuple[int, str]], *, device: bool, rules: Rules = Rules()) -> None:
        self.ranks = range(num_ranks)
        self.rules = rules
        self.device = device
        self.calls = calls
        self.firsts = [1 + sum(count for count, _ in calls[:number]) for number in range(len(calls))]
        self.waits: list[Any] = [Waits(rank, num_ranks, rules) if device else HostAreas(rules) for rank in self.ranks]
        self.num_states = 0
        # Stores of an announcement, in their order. In host memory no rank decides by the counter.
        self.steps = ["counts"]
        if device:
            self.steps = ["counts", "progress"] if rules.count_before_progress else ["progress", "counts"]

    def explore(self) -> int:
        """Visit every reachable state.

        Returns:
            The number of states.

        Raises:
            ProtocolViolation: Some interleaving reads wrong memory or gets stuck.
        """
        start = self._initial()
        seen = {start}
        stack = [start]
        while stack:
            state = stack.pop()
            successors = [s for rank in self.ranks for s in self._moves(state, rank)]
            if not successors and any(host[0] < len(self.calls) for host in state[0]):
                raise ProtocolViolation(f"stuck at {state[0]}")
            for successor in successors:
                successor = self._without_waits(successor)
                if successor not in seen:
                    seen.add(successor)
                    stack.append(successor)
        self.num_states = len(seen)
        return self.num_states

    def _without_waits(self, state):  # type: ignore[no-untyped-def]
        """Return the state after all waits of streams that are over: words only grow, and no other rank sees such a wait end."""
        hosts, queues, counts, memory, words, waits = state
        for rank in self.ranks:
            queue = queues[rank]
            while queue and queue[0][0] == "wait" and words[queue[0][1][0]] >= queue[0][1][1]:
                queue = queue[1:]
            if queue is not queues[rank]:
                queues = _set(queues, rank, queue)
        return hosts, queues, counts, memory, words, waits

    # State: for each rank its host, its stream's queue, its announcements, its memory, its word, and its memory of waits.
    def _initial(self):  # type: ignore[no-untyped-def]
        n = len(self.ranks)
        memory = tuple(((0,) * self.rules.buffers, (0,) * self.rules.buffers, (0, 0)) for _ in self.ranks)
        waits = ((((0,) * NUM_COUNTS,) * n, ((),) * NUM_SLOTS) if self.device else (),) * n
        state = ((0, 0, 0, 0, False, None),) * n, ((),) * n, ((0,) * NUM_COUNTS,) * n, memory, (0,) * n, waits
        for rank in self.ranks:
            state = self._begin(state, rank, 0)
        return state

    def _begin(self, state, rank, number):  # type: ignore[no-untyped-def]
        """Return the state in which a rank has signed a call; without a call it has finished."""
        hosts, queues, counts, memory, words, waits = state
        if number == len(self.calls):
            return _set(hosts, rank, (number, 0, 0, 0, True, None)), queues, counts, memory, words, waits
        memory = self._write(memory, rank, 2, number + 1, number + 1, 2)
        course = self._course(rank, (number, 0, 0, 0, False, None), fresh=True)
        puts, _, _ = self._part(rank, self.calls[number][1])
        left = None if puts else (self.steps[0], ())
        if left:
            queues = _set(queues, rank, (*queues[rank], *self._record(counts, rank)))
        host = (number, course.written, course.read, course.done, False, left)
        return _set(hosts, rank, host), queues, counts, memory, words, waits

    def _record(self, counts, rank) -> list[Micro]:  # type: ignore[no-untyped-def]
        """Return what makes the stream write the rank's word at the next announcement. No other rank sees when it is issued."""
        return [("record", counts[rank][0] + 1)] if self.device else []

    def _part(self, rank: int, kind: str) -> tuple[bool, bool, bool]:
        if kind == LEADER:
            return rank != 0, rank == 0, True
        if kind == FROM_ROOT:
            return rank == 0, False, rank != 0
        return True, kind == SPLIT, kind != TO_ROOT or rank == 0

    def _course(self, rank: int, host: Host, *, fresh: bool = False) -> Course:
        number, written, read, done, _, _ = host
        num_chunks, kind = self.calls[number]
        puts, folds, takes = self._part(rank, kind)
        two_passes = kind in (SPLIT, LEADER)
        course = Course(self.firsts[number], num_chunks, NUM_SLOTS, two_passes, puts, folds, takes)
        if not fresh:
            course.written, course.read, course.done = written, read, done
        return course

    def _moves(self, state, rank):  # type: ignore[no-untyped-def]
        """Yield states after one micro-step of the rank's stream or host."""
        hosts, queues, *_ = state
        result = []
        if queues[rank]:
            moved = self._stream_move(state, rank)
            if moved is not None:
                result.append(moved)
        if hosts[rank][0] < len(self.calls) and (self.device or not queues[rank]):
            moved = self._announce(state, rank) if hosts[rank][5] is not None else self._host_move(state, rank)
            if moved is not None:
                result.append(moved)
        return result

    def _host_move(self, state, rank):  # type: ignore[no-untyped-def]
        """Issue the rank's next action; None if it has to wait."""
        hosts, queues, counts, memory, words, waits = state
        course = self._course(rank, hosts[rank])
        flat = [10**9] * (NUM_COUNTS * len(self.ranks)) if self.rules.skip_await else [c for one in counts for c in one]
        peers = [(r, r * NUM_COUNTS) for r in self.ranks if r != rank]
        action = course.next(flat, peers)
        number, is_checked = hosts[rank][0], hosts[rank][4]
        if action is Action.AWAIT:
            return None
        if action is not Action.PUT and not is_checked:
            for other in self.ranks:
                if memory[other][2][(number + 1) % 2] != number + 1:
                    raise ProtocolViolation(f"description of rank {other} in call {number}")
            is_checked = True
        if action is None:
            return self._begin(state, rank, number + 1)
        issued: list[Micro] = []
        now = self.waits[rank]
        now.resume([c for one in counts for c in one], waits[rank], issued)
        late = self._issue(course, action, rank, self.calls[number][1], now, issued)
        course.after(action)
        left = None
        if not (action is Action.TAKE and (course.is_over() or self.rules.never_announces_a_take)):
            # The last one is announced with the next call.
            left = (self.steps[0], tuple(late))
            issued += self._record(counts, rank)
        host = (number, course.written, course.read, course.done, is_checked, left)
        queue = (*queues[rank], *issued)
        return _set(hosts, rank, host), _set(queues, rank, queue), counts, memory, words, _set(waits, rank, now.state())

    def _issue(self, course, action, rank, kind, now, issued):  # type: ignore[no-untyped-def]
        """Append what the engine issues to the stream before it announces the action; return what a wrong rule issues afterwards."""
        chunk, everybody, area = course.chunk, list(self.ranks), course.chunk % self.rules.buffers
        others = [r for r in everybody if r != rank]
        sources = [0] if kind in (LEADER, FROM_ROOT) else everybody
        if action is Action.PUT:
            if self.rules.record_before_put:
                issued.append(("record", None))
            now.prepare_put(chunk, [0] if kind in (LEADER, TO_ROOT) else others)
            work = [("begin write", (0, area, chunk)), ("end write", (0, area, chunk))]
            late = self.rules.publish_before_put
        elif action is Action.FOLD:
            now.after(others, WRITTEN, chunk)
            now.after(others, DONE, chunk - NUM_SLOTS)
            read = ("read", (0, chunk, tuple(everybody[1:] if kind == LEADER else everybody)))
            work = [read, ("begin write", (1, area, chunk)), ("end write", (1, area, chunk))]
            late = self.rules.publish_before_fold
        else:
            now.after(sources, course.stage, chunk)
            read = ("read", (int(course.two_passes), chunk, tuple(sources)))
            work, late = [read], False
        if late:
            return work
        issued += work
        return []

    def _announce(self, state, rank):  # type: ignore[no-untyped-def]
        hosts, queues, counts, memory, words, waits = state
        _, written, read, done, _, (what, late) = hosts[rank]
        if what == "progress":
            counts = _set(counts, rank, (counts[rank][0] + 1, *counts[rank][1:]))
        else:
            counts = _set(counts, rank, (counts[rank][0], written, read, done))
        following = self.steps[self.steps.index(what) + 1 :]
        if not following:
            queues = _set(queues, rank, (*queues[rank], *late))
        left = (following[0], late) if following else None
        return _set(hosts, rank, (*hosts[rank][:5], left)), queues, counts, memory, words, waits

    def _stream_move(self, state, rank):  # type: ignore[no-untyped-def]
        """Do the next step of the rank's stream; None if it has to wait, see `_without_waits`."""
        hosts, queues, counts, memory, words, waits = state
        (name, argument), *rest = queues[rank]
        if name == "wait":
            return None
        if name == "record":
            words = self._written(words, rank, argument)
        elif name == "read":
            self._expect(memory, *argument)
        else:
            kind, area, chunk = argument
            value = TORN if name == "begin write" else chunk
            memory = self._write(memory, rank, kind, area, value, self.rules.buffers)
        if name != "record" and rest and rest[0][0] == "record":
            # At once: until then no other rank can do more than it could before this step.
            words = self._written(words, rank, rest.pop(0)[1])
        return hosts, _set(queues, rank, tuple(rest)), counts, memory, words, waits

    def _written(self, words, rank, progress):  # type: ignore[no-untyped-def]
        return _set(words, rank, words[rank] + 1 if progress is None else max(progress, words[rank]))

    def _write(self, memory, rank, kind, number, value, size):  # type: ignore[no-untyped-def]
        buffers = _set(memory[rank][kind], number % size, value)
        return _set(memory, rank, _set(memory[rank], kind, buffers))

    def _expect(self, memory, kind, chunk, owners) -> None:  # type: ignore[no-untyped-def]
        for owner in owners:
            found = memory[owner][kind][chunk % self.rules.buffers]
            if found != chunk:
                raise ProtocolViolation(f"memory {kind} of rank {owner}: chunk {found} where chunk {chunk} belongs")


def _set(values, index, value):  # type: ignore[no-untyped-def]
    return (*values[:index], value, *values[index + 1 :])
