"""Find the rank, node or link at fault from the tests of all ranks. Pure.

The search runs only after the whole group failed. Every rank's helper (helper.py) tests its own device, then the links
to its peers, then runs collectives with one other rank at a time. In round k rank i is paired with rank ``i XOR 2**k``,
all pairs at the same time. ``ceil(log2(N))`` rounds pair every rank with ranks of all parts of the job. Two rounds
could not distinguish a bad rank from a bad link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_fracbackend.decide.worker_info import ranks_text

# With up to this many ranks every link is tested, with more only those to a rank's partners and neighbours.
MAX_MESH = 64
# Slow means above this multiple of the job's usual time and this much above it. Real faults are far above the noise.
_SLOW_FACTOR, _SLOW_MARGIN_S = 5.0, 0.25
# Limit of a normal time if there are no other ranks to compare with.
_SLOW_ALONE_S = 1.0
_NUM_NAMED = 4


def num_rounds(world_size: int) -> int:
    """Return the number of rounds that pair every rank along every bit of the rank number."""
    return max(0, (world_size - 1).bit_length())


def partner(rank: int, round_number: int, world_size: int) -> int | None:
    """Return a rank's partner in a round, None if that rank does not exist."""
    other = rank ^ (1 << round_number)
    return other if other < world_size else None


def peers_of(rank: int, world_size: int) -> list[int]:
    """Return the ranks to which a rank tests its link."""
    if world_size <= MAX_MESH:
        return [other for other in range(world_size) if other != rank]
    partners = {partner(rank, number, world_size) for number in range(num_rounds(world_size))}
    neighbours = {(rank + 1) % world_size, (rank - 1) % world_size}
    return sorted(other for other in partners | neighbours if other is not None)


@dataclass(frozen=True, kw_only=True)
class LinkFinding:
    """One rank's view of its link to a peer.

    Attributes:
        connected: Whether a TCP connection to the peer was made.
        heard: Whether a datagram of the peer arrived.
        seconds: Round-trip time of a block over that connection, None if it did not finish in time.
    """

    connected: bool
    heard: bool
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PairFinding:
    """One rank's view of a collective with one peer.

    Attributes:
        peer: The other rank.
        outcome: ``ok``, ``wrong`` (this rank's result is incorrect) or ``failed``.
        seconds: Seconds of the collectives, None if they did not finish.
        error: Error message of the process group.
    """

    peer: int
    outcome: str
    seconds: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of one rank's helper.

    Attributes:
        right: Whether the finished sums that the rank computed without other ranks are correct.
        seconds: Seconds for these sums, None if they did not finish, 0 with ``untried`` or ``failure``.
        links: Findings by peer.
        pairs: Findings by round, without rounds in which the rank had no partner.
        untried: Why the rank's device could not be tested, such as out of memory; empty if it was tested.
        failure: CUDA's error message if the device itself failed, else empty.
    """

    right: bool
    seconds: float | None
    links: Mapping[int, LinkFinding] = field(default_factory=dict)
    pairs: Sequence[PairFinding] = ()
    untried: str = ""
    failure: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Findings:
        """Create findings from the JSON of ``asdict``."""
        return cls(
            right=value["right"],
            seconds=value["seconds"],
            links={int(peer): LinkFinding(**link) for peer, link in value["links"].items()},
            pairs=[PairFinding(**pair) for pair in value["pairs"]],
            untried=value["untried"],
            failure=value["failure"],
        )


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: ``silent rank``, ``failing device``, ``wrong rank``, ``slow rank``, ``cut rank``, ``boundary``, ``cut link``,
            ``one-way link``, ``slow link``, ``pair`` or ``scale``.
        ranks: Ranks at fault; the two ends of a link; the smaller side of a boundary.
        text: Description with ranks and nodes.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str


def diagnose(findings: Mapping[int, Findings], where: Sequence[str], busy: Collection[int] = ()) -> list[Fault]:
    """Return the faults, the most severe first.

    Args:
        findings: Findings of the ranks whose helper answered, by rank.
        where: Rank, node and process of every rank, for the messages.
        busy: Ranks that are not called silent if their helper did not answer.

    Returns:
        At least one fault. If all tests succeed, the fault is that the failure occurs only in the whole group.
    """
    return list(_Diagnosis(findings, where, busy).faults())


class _Diagnosis:
    def __init__(self, findings: Mapping[int, Findings], where: Sequence[str], busy: Collection[int]) -> None:
        self._findings, self._busy = findings, busy
        self._where = where
        self._live = sorted(findings)
        # A device that was not tested is neither fast nor slow.
        tried = {rank: each for rank, each in findings.items() if not each.untried and not each.failure}
        seconds = {rank: _or_endless(finding.seconds) for rank, finding in tried.items()}
        if len(seconds) > 1 and min(seconds.values()) == float("inf"):
            seconds = {}  # if all ranks are slow, as with a slow start of CUDA, none of them is at fault
        limit_s = _slow_limit(seconds.values())
        self._slow_alone = {rank: value for rank, value in seconds.items() if value > limit_s}
        # If a rank is slow, its links and groups are slow too.
        self._sound = [rank for rank in self._live if rank not in self._slow_alone]
        sound = set(self._sound)
        self._tried = {
            (i, j) for i in self._sound for j in findings[i].links if i < j and j in sound and i in findings[j].links
        }
        self._bad = {pair for pair in self._tried if not all(self._connected(*pair))}

    def faults(self) -> Iterator[Fault]:
        # Slow or failing pairs may be a consequence of other faults.
        broken = [*self._silent(), *self._failing(), *self._wrong(), *self._starved(), *self._cut()]
        yield from broken or [*self._slow()] or self._pairs() or self._scale()

    def _connected(self, i: int, j: int) -> tuple[bool, bool]:
        return self._findings[i].links[j].connected, self._findings[j].links[i].connected

    def _silent(self) -> Iterator[Fault]:
        silent = [rank for rank in range(len(self._where)) if rank not in self._findings and rank not in self._busy]
        if silent:
            yield Fault(
                "silent rank",
                tuple(silent),
                f"{self._named(silent)}: no answer: the process is stopped, dead or still in the failed start",
            )

    def _failing(self) -> Iterator[Fault]:
        for rank in self._live:
            if failure := self._findings[rank].failure:
                text = f"the device of {self._where[rank]} failed in a test without other ranks ({failure})"
                yield Fault("failing device", (rank,), text)

    def _wrong(self) -> Iterator[Fault]:
        for rank in self._live:
            if not self._findings[rank].right:
                yield Fault("wrong rank", (rank,), f"{self._where[rank]} computed wrong sums without other ranks")
        ended = {(i, j): (self._outcome(i, j), self._outcome(j, i)) for i, j in self._pairs_tried()}
        wrong = {pair for pair, outcomes in ended.items() if "wrong" in outcomes}
        wrong -= {pair for pair in wrong if not all(self._findings[rank].right for rank in pair)}
        while wrong:
            # Select the rank that explains most pairs: only it has a wrong result, or it is in the most wrong pairs and the
            # fewest correct ones.
            blame = {rank: self._blame(rank, wrong, ended) for pair in wrong for rank in pair}
            worst = max(blame.values())
            ranks = tuple(sorted(rank for rank, score in blame.items() if score == worst))
            peers = sorted({rank for pair in wrong if set(ranks) & set(pair) for rank in pair} - set(ranks[:1]))
            text = f"{' or '.join(self._where[rank] for rank in ranks)} gets wrong results in collectives"
            yield Fault("wrong rank", ranks, f"{text} with {ranks_text(peers)}" if len(ranks) == 1 else text)
            wrong -= {pair for pair in wrong if set(ranks) & set(pair)}

    def _blame(
        self, rank: int, wrong: set[tuple[int, int]], ended: Mapping[tuple[int, int], tuple[str, str]]
    ) -> tuple[int, int, int]:
        own = [pair for pair in wrong if rank in pair]
        alone = sum(ended[pair][pair.index(rank)] == "wrong" and ended[pair].count("wrong") == 1 for pair in own)
        right = sum(rank in pair and set(outcomes) == {"ok"} for pair, outcomes in ended.items())
        return alone, len(own), -right

    def _pairs_tried(self) -> Iterator[tuple[int, int]]:
        for rank in self._live:
            yield from ((rank, pair.peer) for pair in self._findings[rank].pairs if rank < pair.peer in self._findings)

    def _outcome(self, rank: int, peer: int) -> str:
        return next((pair.outcome for pair in self._findings[rank].pairs if pair.peer == peer), "failed")

    def _starved(self) -> Iterator[Fault]:
        for rank, seconds in self._slow_alone.items():
            took = f"took {seconds:.2f} s" if seconds < float("inf") else "did not finish"
            yield Fault("slow rank", (rank,), f"{self._where[rank]} is slow: its sums without other ranks {took}")

    def _cut(self) -> Iterator[Fault]:
        groups = self._groups()
        left = set(self._bad)
        if len(groups) > 1 and len(self._sound) > 2:
            for group in groups[1:]:
                left -= {pair for pair in left if (pair[0] in group) != (pair[1] in group)}
                if len(group) == 1:
                    yield Fault("cut rank", group, f"{self._where[group[0]]} is cut off from all other ranks")
                else:
                    yield Fault("boundary", group, f"{self._named(group)} are cut off from the other ranks")
        for i, j in sorted(left):
            yield self._link(i, j)

    def _groups(self) -> list[tuple[int, ...]]:
        """Group ranks that reach each other, the largest group first; equal groups by their lowest rank."""
        group_of = {rank: [rank] for rank in self._sound}
        for i, j in self._tried - self._bad:
            large, small = sorted((group_of[i], group_of[j]), key=len, reverse=True)
            if large is not small:
                # Merge the smaller group into the larger, so a rank moves at most log2(N) times.
                large += small
                group_of.update(dict.fromkeys(small, large))
        groups = {id(ranks): ranks for ranks in group_of.values()}.values()
        return sorted((tuple(sorted(ranks)) for ranks in groups), key=lambda ranks: (-len(ranks), ranks))

    def _link(self, i: int, j: int) -> Fault:
        heard = self._findings[i].links[j].heard, self._findings[j].links[i].heard
        connected = self._connected(i, j)
        between = f"between {self._where[i]} and {self._where[j]}"
        if heard == (True, True):
            if connected == (False, False):
                return Fault(
                    "cut link", (i, j), f"the link {between} passes UDP datagrams but no TCP connections: a firewall"
                )
            end = j if connected[1] else i
            return Fault("one-way link", (i, j), f"only {self._where[end]} can open connections {between}: a firewall")
        if heard == (False, False):
            return Fault("cut link", (i, j), f"the link {between} is cut in both directions")
        source, target = (j, i) if heard[0] else (i, j)
        return Fault(
            "one-way link",
            (i, j),
            f"the link {between} passes packets from rank {source} to rank {target} but none back",
        )

    def _slow(self) -> Iterator[Fault]:
        times = {pair: self._link_seconds(*pair) for pair in self._tried - self._bad}
        limit_s = _slow_limit(times.values())
        slow_links = {pair for pair, seconds in times.items() if seconds > limit_s}
        own_links: dict[int, list[tuple[int, int]]] = {}
        for pair in times:
            for rank in pair:
                own_links.setdefault(rank, []).append(pair)
        for rank, own in sorted(own_links.items()):
            if len(own) > 1 and slow_links.issuperset(own):
                yield Fault("slow rank", (rank,), f"{self._where[rank]} is slow towards all other ranks")
                slow_links -= set(own)
        for i, j in sorted(slow_links):
            took = f"took {times[i, j]:.2f} s" if times[i, j] < float("inf") else "did not finish"
            text = f"the link between {self._where[i]} and {self._where[j]} is slow: the round trip of a block {took}"
            yield Fault("slow link", (i, j), text)

    def _link_seconds(self, i: int, j: int) -> float:
        seconds = (self._findings[i].links[j].seconds, self._findings[j].links[i].seconds)
        return max(_or_endless(value) for value in seconds)

    def _pairs(self) -> list[Fault]:
        failed = {
            (min(rank, pair.peer), max(rank, pair.peer)): pair.error
            for rank in self._sound
            for pair in self._findings[rank].pairs
            if pair.outcome != "ok"
        }
        return [
            Fault(
                "pair",
                pair,
                f"a group of only {self._where[pair[0]]} and {self._where[pair[1]]} fails too, although their link works "
                f"({error or 'wrong result'})",
            )
            for pair, error in sorted(failed.items())
        ]

    def _scale(self) -> list[Fault]:
        text = (
            f"all {len(self._where)} ranks, their links and their groups of two work in new processes: the fault occurs "
            "only in the whole group or in the workers' own processes"
        )
        untried = [rank for rank in self._live if self._findings[rank].untried]
        for rank in untried[:_NUM_NAMED]:
            text += f"; the device of {self._where[rank]} could not be tested ({self._findings[rank].untried})"
        if len(untried) > _NUM_NAMED:
            text += f"; nor could the devices of {ranks_text(untried[_NUM_NAMED:])}"
        return [Fault("scale", (), text)]

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._where[rank] for rank in ranks) if len(ranks) <= _NUM_NAMED else ranks_text(list(ranks))


def _or_endless(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds


def _slow_limit(seconds: Iterable[float]) -> float:
    values = sorted(value for value in seconds if value < float("inf"))
    if len(values) < 2:
        return _SLOW_ALONE_S
    # A slow rank makes more than half of the links of a small job slow, so the median is not used.
    usual = values[len(values) // 4]
    return max(_SLOW_FACTOR * usual, usual + _SLOW_MARGIN_S)
