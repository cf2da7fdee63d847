"""The table of injected faults: every accelerated collective, every phase, every fault. No processes here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from ipc_calls import CALLS, NUMEL, SMALL_NUMEL, Call, Point, points

from ray_fracbackend.ipc.protocol.schedule import Action

SIZE = 3
FAULTS = ("kill", "stop", "raise", "mismatch", "leave")
# Both deadlines are those of a call. Only for a stopped rank the others must wait.
STOP_TIMEOUT_S = 2.0
TIMEOUT_S = 40.0
# Groups are created one after another while other tests may use the machine; this time is not tested.
SETUP_TIMEOUT_S = 150.0
# Maximum time for a rank to raise an error beyond that; large, because these tests share their cores.
MARGIN_S = 10.0

BARRIER = CALLS["barrier"]
EARLIER = CALLS["all_gather"]
# Position of the peers when the victim's other call begins: each rank arrives at its own time; they wait for it; they are about to do that
# action, and continue only after the victim has progressed as far as it can; they read the last chunk of the previous call; all calls are
# in their queues.
PEER_PHASES = ("any", "waiting", "SIGN", "PUT", "PUBLISH", "AWAIT", "CHECK", "earlier", "queued")


@dataclass(frozen=True)
class Case:
    """One fault in one group of three ranks.

    Attributes:
        collective: Key of `CALLS`.
        fault: One of `FAULTS`: the victim is killed, is stopped, raises an error in a call, makes another call, or leaves.
        calls: Calls of all ranks except the victim, in this order.
        victim_calls: Calls of the victim.
        victim: Rank of the victim.
        point: Point of the fault in the first call.
        peers: One of `PEER_PHASES`, for a mismatch.
        differs_at: Number of calls before the one in which the ranks disagree.
        texts: Texts that the error must contain, for a mismatch.
        asynchronous: Whether all calls are started before any is waited for.
        hosts: Host of each rank.
    """

    collective: str
    fault: str
    calls: tuple[Call, ...]
    victim_calls: tuple[Call, ...]
    victim: int
    point: Point = (Action.SIGN, 0)
    peers: str = ""
    differs_at: int = 0
    texts: tuple[str, ...] = ()
    asynchronous: bool = False
    hosts: str = "aaa"

    @property
    def timeout_s(self) -> float:
        """Return the time limit of its calls."""
        return STOP_TIMEOUT_S if self.fault == "stop" else TIMEOUT_S

    def __str__(self) -> str:
        what = f"{self.point[0].name} {self.point[1]}"
        if self.fault in ("mismatch", "leave"):
            what = f"{' '.join(map(str, self.victim_calls))} for {' '.join(map(str, self.calls))}, peers {self.peers}"
        mode = "asynchronous" if self.asynchronous else "synchronous"
        return f"[{self.collective}: rank {self.victim}, {self.fault}, {what}, {mode}, hosts {self.hosts}]"


def cases_of(collective: str, fault: str) -> list[Case]:
    """Return all cases of a collective and a fault, alternating victims and, for mismatches, hosts."""
    make = {"mismatch": _mismatches, "leave": _leavings}.get(fault)
    made = _struck(collective, fault) if make is None else make(collective)
    victims = itertools.cycle(range(SIZE))
    return [replace(case, victim=next(victims)) for case in made]


def sample(seed: int) -> dict[str, list[Case]]:
    """Return some cases for each fault: every collective with each fault, the rest at random."""
    rng = random.Random(seed)
    chosen: dict[str, list[Case]] = {}
    for fault in FAULTS:
        tables = [cases_of(collective, fault) for collective in CALLS]
        several = 3 if fault == "mismatch" else 1
        cases = [case for table in tables for case in rng.sample(table, several)]
        rng.shuffle(cases)
        chosen[fault] = [replace(case, victim=rng.randrange(SIZE)) for case in cases]
    return chosen


def _struck(collective: str, fault: str) -> Iterator[Case]:
    call = CALLS[collective]
    # If a rank fails after its last publication, the others finish; the next call must report it.
    case = Case(collective, fault, (call, BARRIER), (call, BARRIER), 0)
    every = points(call, SIZE)
    last = dict(every)
    for asynchronous in (False, True):
        for action, number in every:
            if number in (0, 1, last[action]):
                yield replace(case, point=(action, number), asynchronous=asynchronous)
    for action in Action:
        if action is not Action.FOLD:  # partial results for other hosts are not divided among the ranks
            yield replace(case, point=(action, 0), hosts="aab")


def variants(call: Call) -> dict[str, tuple[Call, tuple[str, ...]]]:
    """Return calls that differ from `call` in one property, with the text of both in messages."""
    if call.name == "barrier":
        return {}
    different = {"dtype": replace(call, dtype=torch.int32)}
    if call.reduces():
        different["reduce op"] = replace(call, op="MAX")
    if call.has_root():
        different["root"] = replace(call, root=1)
    if call.name == "all_reduce":
        different["through Gloo"] = replace(call, sparse=True)
    shapes = {"shape": replace(call, numel=call.numel + 1), "chunks": replace(call, numel=call.numel + NUMEL)}
    if not call.name.startswith("all_to_all"):
        different |= shapes
        return {kind: (other, (str(call), str(other))) for kind, other in different.items()}
    found: dict[str, tuple[Call, tuple[str, ...]]]
    found = {kind: (other, (str(call), str(other))) for kind, other in different.items()}
    for kind, other in shapes.items():
        # Sizes may differ by pair there, but both sides of a pair must agree.
        found[kind] = (other, (f"{4 * call.numel}", f"{4 * other.numel}", " sends ", "which expects"))
    return found


def _mismatches(collective: str) -> Iterator[Case]:
    call = CALLS[collective]
    # The next calls of both sides; none may equal the call itself.
    end = BARRIER if call.name != "barrier" else Call("all_reduce", SMALL_NUMEL)
    pairs: list[tuple[str, tuple[Call, ...], tuple[Call, ...], int, tuple[str, ...]]] = [
        (kind, (call, end), (other, end), 0, texts) for kind, (other, texts) in variants(call).items()
    ]
    pairs += [
        (f"operation {name}", (call, end), (other, end), 0, (str(call), str(other)))
        for name, other in CALLS.items()
        if other.name != call.name
    ]
    pairs.append(("extra", (call, end), (call, call, end), 1, (str(end), str(call))))
    pairs.append(("missing", (call, end), (end,), 0, (str(call), str(end))))
    partners = sorted(kind for kind, *_ in pairs if kind.startswith("operation"))
    for number, phase in enumerate(PEER_PHASES):
        for kind, ours, theirs, differs_at, texts in pairs:
            # Every other operation once; each of the phases with a few of them.
            if phase != "any" and kind in partners and partners.index(kind) % len(PEER_PHASES) != number:
                continue
            case = Case(collective, "mismatch", ours, theirs, 0, differs_at=differs_at, texts=texts, peers=phase)
            case = replace(case, asynchronous=phase == "queued")
            if phase in ("earlier", "queued"):
                more = {"calls": (EARLIER, *ours), "victim_calls": (EARLIER, *theirs), "differs_at": differs_at + 1}
                case = replace(case, **more)
            yield case
            if phase in ("any", "queued"):
                yield replace(case, hosts="aab")


def _leavings(collective: str) -> Iterator[Case]:
    call = CALLS[collective]
    for asynchronous in (False, True):
        # The victim makes one call more than the others, which leave after theirs; or one less, and leaves itself.
        yield Case(collective, "leave", (call,), (call, call), 0, peers="go", asynchronous=asynchronous)
        yield Case(collective, "leave", (call, call), (call,), 0, peers="stay", asynchronous=asynchronous)
