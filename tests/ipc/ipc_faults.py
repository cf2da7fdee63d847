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
# Both deadlines are those of a call. Only a stopped rank has to be waited for.
STOP_TIMEOUT_S = 2.0
TIMEOUT_S = 40.0
# Groups are made one after another while the machine may be busy with other tests; that is not what is tested.
SETUP_TIMEOUT_S = 150.0
# Longest that a rank may take to raise beyond that; generous, because these tests share their cores.
MARGIN_S = 10.0

BARRIER = CALLS["barrier"]
EARLIER = CALLS["all_gather"]
# Where the peers are when the victim's other call begins: each rank comes when it comes; they wait for it; they are
# about to do that action, and go on only when the victim has got as far as it can; they read the last chunk of the
# call before; all calls are in their queues.
PEER_PHASES = ("any", "waiting", "SIGN", "PUT", "PUBLISH", "AWAIT", "CHECK", "earlier", "queued")


@dataclass(frozen=True)
class Case:
    """One fault in one group of three ranks.

    Attributes:
        collective: Key of `CALLS`.
        fault: One of `FAULTS`: the victim is killed, is stopped, raises inside a call, makes another call, or goes.
        calls: What all but the victim call, in this order.
        victim_calls: What the victim calls.
        victim: Its rank.
        point: Where in the first call it is struck.
        peers: One of `PEER_PHASES`, for a mismatch.
        differs_at: Number of calls before the one in which the ranks disagree.
        texts: What the error must show, for a mismatch.
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
        """Time limit of its calls."""
        return STOP_TIMEOUT_S if self.fault == "stop" else TIMEOUT_S

    def __str__(self) -> str:
        what = f"{self.point[0].name} {self.point[1]}"
        if self.fault in ("mismatch", "leave"):
            what = f"{' '.join(map(str, self.victim_calls))} for {' '.join(map(str, self.calls))}, peers {self.peers}"
        mode = "asynchronous" if self.asynchronous else "synchronous"
        return f"[{self.collective}: rank {self.victim}, {self.fault}, {what}, {mode}, hosts {self.hosts}]"


def cases_of(collective: str, fault: str) -> list[Case]:
    """All cases of a collective and a fault; victims and, for mismatches, hosts take turns."""
    make = {"mismatch": _mismatches, "leave": _leavings}.get(fault)
    made = _struck(collective, fault) if make is None else make(collective)
    victims = itertools.cycle(range(SIZE))
    return [replace(case, victim=next(victims)) for case in made]


def sample(seed: int) -> dict[str, list[Case]]:
    """Some cases for each fault: every collective with each, the rest by chance."""
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
    # A rank struck after its last publication lets the others finish; the next call must report it.
    case = Case(collective, fault, (call, BARRIER), (call, BARRIER), 0)
    every = points(call, SIZE)
    last = dict(every)
    for asynchronous in (False, True):
        for action, number in every:
            if number in (0, 1, last[action]):
                yield replace(case, point=(action, number), asynchronous=asynchronous)
    for action in Action:
        if action is not Action.FOLD:  # partial results for other hosts are not split over the ranks
            yield replace(case, point=(action, 0), hosts="aab")


def variants(call: Call) -> dict[str, tuple[Call, tuple[str, ...]]]:
    """Other calls that differ from `call` in one thing, with what messages show of the two."""
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
        # Sizes may differ by pair there; what counts is that both sides of a pair agree.
        found[kind] = (other, (f"{4 * call.numel}", f"{4 * other.numel}", " sends ", "which expects"))
    return found


def _mismatches(collective: str) -> Iterator[Case]:
    call = CALLS[collective]
    # What both sides call after it; nothing here may look like the call itself.
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
            # Every other operation once; of the phases each with a few of them.
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
        # The victim makes one call more than the others, which go after theirs; or one less, and goes itself.
        yield Case(collective, "leave", (call,), (call, call), 0, peers="go", asynchronous=asynchronous)
        yield Case(collective, "leave", (call, call), (call,), 0, peers="stay", asynchronous=asynchronous)
