"""A model of the slot protocol: every interleaving of small cases over fake memory and fake events.

The sequences are those of `ray_fracbackend.ipc.protocol.schedule` itself. Each rank has a host, which runs its actions in order
and waits for counters, and a stream, which carries out copies, event records and event waits in the order in which the
host issued them, any time later (device memory) or at once (host memory). Fake events have the semantics of CUDA's:
a wait binds to the latest record issued so far, and a wait on an event that was never recorded does nothing.

A copy is two micro-steps, and so is a read: memory that is being written, or that changes between begin and end of a
read, is an error, and so is memory of another step than the reader means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray_fracbackend.ipc.protocol.schedule import Action, schedule

TORN = -1


class ProtocolViolation(AssertionError):
    """An interleaving in which a rank reads the wrong bytes."""


@dataclass(frozen=True)
class Rules:
    """The protocol's parameters; the defaults are the real ones, others must be found wrong."""

    buffers: int = 2
    events: int = 2
    publish_before_put: bool = False
    skip_await: bool = False
    skip_wait_event: bool = False
    wait_event_before_await: bool = False
    publish_before_fold: bool = False


# How a collective reduces: in one pass, in two with every rank folding its share, or in two with rank 0 folding all.
ONE, SPLIT, LEADER = "one pass", "split", "leader"
Micro = tuple[str, int]


def host_program(calls: Iterable[tuple[int, str]], rules: Rules, rank: int) -> list[Micro]:
    """Host micro-steps of one rank for collectives of ``(num_chunks, kind)``; ``(name, step)``."""
    program: list[Micro] = []
    first = 1
    for num_chunks, kind in calls:
        entries = list(schedule(num_chunks, two_passes=kind != ONE))
        if kind == LEADER:
            # The leader reads its own input where it is; the others have nothing to fold.
            useless = Action.PUT if rank == 0 else Action.FOLD
            entries = [e for e in entries if e[0] is not useless]
        late = {Action.PUT: rules.publish_before_put, Action.FOLD: rules.publish_before_fold}
        delayed = {(action, step) for action, _, step in entries if late.get(action)}
        for action, _, offset in entries:
            if (action, offset) in delayed:
                continue
            program += _micros(action, first + offset, rules)
            if action is Action.PUBLISH:
                for other in (Action.PUT, Action.FOLD):
                    program += _micros(other, first + offset, rules) if (other, offset) in delayed else []
        first += 1 + max(offset for _, _, offset in entries)
    return program


def _micros(action: Action, step: int, rules: Rules) -> list[Micro]:
    if action is Action.PUT:
        return [("write slot", step)]
    if action is Action.FOLD:
        return [("read slot", step - 1), ("write folded", step)]
    if action is Action.PUBLISH:
        return [("record", step), ("publish", step)]
    if action is Action.AWAIT:
        wait = [] if rules.skip_wait_event else [("wait event", step)]
        poll = [] if rules.skip_await else [("await", step)]
        return [*wait, *poll] if rules.wait_event_before_await else [*poll, *wait]
    if action is Action.TAKE:
        return [("take", step)]
    return [("sign", step)] if action is Action.SIGN else [("check", step)]


class Explorer:
    """Walks all interleavings of `num_ranks` ranks that run the same calls.

    Args:
        num_ranks: Ranks.
        calls: ``(num_chunks, kind)`` of each collective.
        device: Streams lag behind hosts; else they keep up.
        rules: Protocol parameters.
    """

    def __init__(self, num_ranks: int, calls: list[tuple[int, str]], *, device: bool, rules: Rules = Rules()) -> None:
        self.ranks = range(num_ranks)
        self.rules = rules
        self.device = device
        self.hosts = [host_program(calls, rules, rank) for rank in self.ranks]
        self.folds = {step for host in self.hosts for name, step in host if name == "write folded"}
        steps = [kind for num_chunks, kind in calls for _ in range(num_chunks + (kind != ONE))]
        self.led = {number for number, kind in enumerate(steps, 1) if kind == LEADER}
        self.num_states = 0

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
            left = [host[pc] for host, pc in zip(self.hosts, state[0], strict=True) if pc < len(host)]
            if not successors and left:
                raise ProtocolViolation(f"stuck at {left}")
            for successor in successors:
                if successor not in seen:
                    seen.add(successor)
                    stack.append(successor)
        self.num_states = len(seen)
        return self.num_states

    # State: per rank the host's position, the stream's queue, counters, memory, events (issued, executed).
    def _initial(self):  # type: ignore[no-untyped-def]
        n = len(self.ranks)
        memory = tuple(((0,) * self.rules.buffers,) * 3 for _ in self.ranks)
        events = tuple(((0,) * self.rules.events, (0,) * self.rules.events) for _ in self.ranks)
        return (0,) * n, ((),) * n, (0,) * n, memory, events

    def _moves(self, state, rank):  # type: ignore[no-untyped-def]
        """States after one micro-step of the rank's stream or host."""
        pcs, queues, counters, *_ = state
        result = []
        if queues[rank]:
            moved = self._stream_move(state, rank)
            if moved is not None:
                result.append(moved)
        host_may_run = pcs[rank] < len(self.hosts[rank]) and (self.device or not queues[rank])
        if host_may_run:
            name, step = self.hosts[rank][pcs[rank]]
            ready = name != "await" or all(counters[r] >= step for r in self.ranks)
            if ready:
                result.append(self._host_move(state, rank, name, step))
        return result

    def _host_move(self, state, rank, name, step):  # type: ignore[no-untyped-def]
        pcs, queues, counters, memory, events = state
        pcs = _set(pcs, rank, pcs[rank] + 1)
        queue = queues[rank]
        if name == "publish":
            counters = _set(counters, rank, step)
        elif name == "sign":
            memory = self._write(memory, rank, 2, step, step)
        elif name == "check":
            self._expect(memory, 2, step)
        elif name == "record":
            issued, executed = events[rank]
            events = _set(events, rank, (_set(issued, step % self.rules.events, step), executed))
            queue = (*queue, ("record", step))
        elif name == "wait event":
            # Binds now to the latest record that each peer has issued, as CUDA does; 0 means never recorded.
            bound = tuple(events[r][0][step % self.rules.events] for r in self.ranks)
            queue = (*queue, ("wait", bound))
        elif name.startswith("write"):
            kind = 0 if name == "write slot" else 1
            queue = (*queue, ("begin write", (kind, step)), ("end write", (kind, step)))
        elif name in ("read slot", "take"):
            kind = 1 if name == "take" and step in self.folds else 0
            queue = (*queue, ("read", (kind, step)), ("read", (kind, step)))
        return pcs, _set(queues, rank, queue), counters, memory, events

    def _stream_move(self, state, rank):  # type: ignore[no-untyped-def]
        pcs, queues, counters, memory, events = state
        (name, argument), rest = queues[rank][0], queues[rank][1:]
        if name == "wait":
            # A wait bound to a record ends when the recording stream has come that far.
            if any(max(events[r][1]) < bound for r, bound in enumerate(argument)):
                return None
        elif name == "record":
            issued, executed = events[rank]
            events = _set(events, rank, (issued, _set(executed, argument % self.rules.events, argument)))
        elif name == "begin write":
            memory = self._write(memory, rank, argument[0], argument[1], TORN)
        elif name == "end write":
            memory = self._write(memory, rank, argument[0], argument[1], argument[1])
        else:
            self._expect(memory, argument[0], argument[1])
        return pcs, _set(queues, rank, rest), counters, memory, events

    def _write(self, memory, rank, kind, step, value):  # type: ignore[no-untyped-def]
        buffers = _set(memory[rank][kind], step % self.rules.buffers, value)
        return _set(memory, rank, _set(memory[rank], kind, buffers))

    def _expect(self, memory, kind, step) -> None:  # type: ignore[no-untyped-def]
        owners = self.ranks
        if step in self.led and kind < 2:
            # Slots of the followers, folded memory of the leader: no rank reads the others.
            owners = owners[1:] if kind == 0 else owners[:1]
        for owner in owners:
            found = memory[owner][kind][step % self.rules.buffers]
            if found != step:
                raise ProtocolViolation(f"memory {kind} of rank {owner}: step {found} where step {step} belongs")


def _set(values, index, value):  # type: ignore[no-untyped-def]
    return (*values[:index], value, *values[index + 1 :])
