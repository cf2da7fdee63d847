"""What does it cost if one process waits for another's work on the same GPU?

usage: python benchmarks/gpu_handoff.py [--ranks 2 4 8] [--hops 200] [--mps] [--budget-s 90] [--dry] [--out FOLDER]

The ranks form a ring. At hop n a rank waits until the host's sequence number is n, makes its stream wait for the event
of its predecessor, launches a small kernel, records its own event and publishes n + 1. The result is microseconds per
hop over all hops, including the end of the last kernel. Methods:

``event``   the stream waits for the peer's interprocess event; the host runs ahead
``host``    the host waits for its own event before it publishes; no stream waits
``number``  only the sequence number, no GPU: the cost of the host's part
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import parser, save
from gpu_ranks import Cases, Rank, add_options, in_rank

WAYS = ("event", "host", "number")
_NUM_SLOTS = 2


class Sequence:
    """A number in memory that all ranks map; only one rank at a time may increase it."""

    def __init__(self, path: Path, create: bool) -> None:
        with open(path, "a+b" if create else "r+b") as file:
            if create:
                file.truncate(mmap.PAGESIZE)
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("q")

    def publish(self, number: int) -> None:
        self._words[0] = number

    def wait(self, number: int) -> None:
        while self._words[0] < number:
            os.sched_yield()


def events_of(rank: Rank) -> tuple[list[torch.cuda.Event], list[torch.cuda.Event]]:
    """Return this rank's own ring of interprocess events and its predecessor's."""
    own = [torch.cuda.Event(interprocess=True) for _ in range(_NUM_SLOTS)]
    for slot, event in enumerate(own):
        event.record()
        rank.store.set(f"event/{rank.rank}/{slot}", event.ipc_handle())
    before = (rank.rank - 1) % rank.num_ranks
    handles = [rank.store.get(f"event/{before}/{slot}") for slot in range(_NUM_SLOTS)]
    return own, [torch.cuda.Event.from_ipc_handle(rank.device, handle) for handle in handles]


class Ring:
    """This rank's part of the hops with one method."""

    def __init__(self, rank: Rank, way: str, sequence: Sequence) -> None:
        self._rank, self._way, self._sequence = rank, way, sequence
        self._number = torch.zeros(1, device=rank.device)
        self._own, self._others = events_of(rank) if way == "event" else ([], [])
        self._event = torch.cuda.Event() if way == "host" else None

    def run(self, first: int, num_hops: int) -> float:
        """Return the seconds of this number of hops on this rank, starting with a sequence number."""
        rank = self._rank
        rank.synchronize()
        dist.barrier(rank.control)
        started = time.perf_counter()
        for hop in range(rank.rank, num_hops, rank.num_ranks):
            self._sequence.wait(first + hop)
            self._work(hop)
            self._sequence.publish(first + hop + 1)
        rank.synchronize()
        self._sequence.wait(first + num_hops)
        seconds = time.perf_counter() - started
        dist.barrier(rank.control)  # an exported event must outlive its importers' waits
        return seconds

    def _work(self, hop: int) -> None:
        if self._way == "event":
            # A slot is recorded again only after its wait of the previous round was issued, because the ring has come
            # around.
            if hop > 0:
                torch.cuda.current_stream().wait_event(self._others[(hop - 1) // self._rank.num_ranks % _NUM_SLOTS])
            self._number.add_(1)
            self._own[hop // self._rank.num_ranks % _NUM_SLOTS].record()
        elif self._event is not None:
            self._number.add_(1)
            self._event.record()
            self._event.synchronize()


def measure(rank: Rank) -> None:
    path = Path(rank.spec["folder"], "sequence")
    if rank.rank == 0:
        sequence = Sequence(path, create=True)
    dist.barrier(rank.control)
    if rank.rank != 0:
        sequence = Sequence(path, create=False)
    first = 0
    num_hops = rank.spec["hops"]
    for way in rank.spec["ways"]:
        ring, seconds = Ring(rank, way, sequence), []
        for _ in range(4):  # the first run is the warm-up
            seconds.append(rank.slowest(ring.run(first, num_hops)))
            first += num_hops
        microseconds = sorted(value / num_hops * 1e6 for value in seconds[1:])
        rank.tell({"way": way, "num_hops": num_hops, "median_us": microseconds[1], "us": microseconds})


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--hops", type=int, default=200)
    add_options(options, 90)
    arguments = options.parse_args()
    ways = WAYS[-1:] if arguments.dry else WAYS
    hops = min(arguments.hops, 40) if arguments.dry else arguments.hops
    all_ranks = arguments.ranks[:1] if arguments.dry else arguments.ranks
    cases = Cases(__file__, arguments)
    with cases.running():
        for num_ranks in all_ranks:
            cases.run("none", num_ranks, ways=ways, hops=hops)
    print(save("gpu_handoff", arguments.out, cases.results()))


if __name__ == "__main__" and not in_rank(measure):
    main()
