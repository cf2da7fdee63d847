"""Run one rank's part of the search for the fault, in a process that can be killed. Needs only torch, not Ray.

search.py starts it as ``python -m ray_fracbackend.isolation.helper ADDRESS``. It listens only on that address. It
prints its ports as one line of JSON, reads its task as another line, and prints its findings as a third. Peers know the
token of the search. A connection or datagram without the token is dropped. Data from a socket is not interpreted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TextIO

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from ray_fracbackend.decide.error_texts import cause_of, says_nothing_of_device
from ray_fracbackend.isolation.faults import Findings, LinkFinding, PairFinding
from ray_fracbackend.timeouts import bounded
from ray_fracbackend.worker.store import open_store, uses_libuv

BLOCK_BYTES = 64 * 1024
_NUM_DATAGRAMS = 8
_SIZES = (128, 131_072)
_CAUSE_CHARS = 200
# A helper ends by itself after this time if its worker is gone.
_LIFE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class HelperAddress:
    """Address and ports of a helper.

    Attributes:
        address: Literal IP.
        link_port: TCP port for the link test.
        datagram_port: UDP port for the link test.
        store_port: Port of the helper's store, for groups in which it is the lower rank.
    """

    address: str
    link_port: int
    datagram_port: int
    store_port: int


@dataclass(frozen=True, kw_only=True)
class HelperTask:
    """Tests that a helper must run.

    Attributes:
        rank: The helper's rank.
        token: Secret of this search, the same on all ranks.
        peers: Addresses of the peers whose link it tests, by rank.
        partners: Partner in every round, None for a round without one.
        device: torch device for the sums that the helper computes without other ranks.
        link_s: Seconds for all links together.
        round_s: Seconds for each round. Rounds start at fixed times, so a failed round delays no other rank.
    """

    rank: int
    token: str
    peers: Mapping[int, HelperAddress]
    partners: tuple[int | None, ...]
    device: str
    link_s: float
    round_s: float

    @classmethod
    def from_json(cls, text: str) -> HelperTask:
        """Create a task from the JSON of ``asdict``."""
        value = json.loads(text)
        peers = {int(rank): HelperAddress(**address) for rank, address in value.pop("peers").items()}
        return cls(peers=peers, partners=tuple(value.pop("partners")), **value)


class Helper:
    """Sockets and tests of one helper.

    Args:
        address: Literal IP of this node to listen on.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=256)
        self._datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self._datagrams.bind((address, 0))
        self._store = open_store(host=address)
        self.address = HelperAddress(
            address=address,
            link_port=self._listener.getsockname()[1],
            datagram_port=self._datagrams.getsockname()[1],
            store_port=int(self._store.port),
        )

    def run(self, task: HelperTask) -> Findings:
        """Run all tests, within ``link_s + rounds * round_s`` seconds."""
        started = time.monotonic()
        links_end = started + task.link_s
        threading.Thread(target=self._answer, args=(task.token.encode(),), daemon=True).start()
        alone = self._alone(task)
        links = self._links(task, links_end)
        pairs = []
        for number, peer in enumerate(task.partners):
            time.sleep(max(0.0, links_end + number * task.round_s - time.monotonic()))
            if peer is not None:
                pairs.append(self._pair(task, number, peer, links_end + (number + 1) * task.round_s))
        return replace(alone, links=links, pairs=pairs)

    def _alone(self, task: HelperTask) -> Findings:
        """Compute sums on the rank's own device; a sum is wrong only if it was compared and differs."""
        started = time.perf_counter()
        try:
            right = bounded(lambda: sums_are_right(torch.device(task.device)), task.link_s / 3)
        except TimeoutError:
            return Findings(right=True, seconds=None)
        except (RuntimeError, AssertionError) as error:  # RuntimeError of CUDA, AssertionError of a CPU-only build
            cause = cause_of(error)[:_CAUSE_CHARS]
            if says_nothing_of_device(error):
                return Findings(right=True, seconds=0.0, untried=cause)
            return Findings(right=True, seconds=0.0, failure=cause)
        return Findings(right=right, seconds=time.perf_counter() - started)

    def _links(self, task: HelperTask, end: float) -> dict[int, LinkFinding]:
        heard: set[int] = set()
        listening = threading.Thread(target=self._listen, args=(task, end, heard), daemon=True)
        listening.start()
        with ThreadPoolExecutor(max(1, len(task.peers))) as pool:
            tried = dict(
                zip(
                    task.peers,
                    pool.map(lambda peer: _try_link(peer, task.token, end), task.peers.values()),
                    strict=True,
                )
            )
        # Listen until the end, because other ranks may still wait for this rank.
        listening.join()
        return {
            rank: LinkFinding(connected=connected, heard=rank in heard, seconds=seconds)
            for rank, (connected, seconds) in tried.items()
        }

    def _listen(self, task: HelperTask, end: float, heard: set[int]) -> None:
        pause_s = max(0.05, (end - time.monotonic()) / _NUM_DATAGRAMS)
        words = {f"{task.token} {rank}".encode(): rank for rank in task.peers}
        mine = f"{task.token} {task.rank}".encode()
        next_send = 0.0
        while (now := time.monotonic()) < end:
            if now >= next_send:
                next_send = now + pause_s
                for peer in task.peers.values():
                    with contextlib.suppress(OSError):  # refused or unreachable: the peer does not receive it
                        self._datagrams.sendto(mine, (peer.address, peer.datagram_port))
            self._datagrams.settimeout(max(0.001, min(next_send, end) - time.monotonic()))
            with contextlib.suppress(OSError):
                word = self._datagrams.recv(len(mine) + 32)
                if word in words:
                    heard.add(words[word])

    def _answer(self, token: bytes) -> None:
        """Echo the peers' data until the process ends."""
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=_echo, args=(connection, token), daemon=True).start()

    def _pair(self, task: HelperTask, number: int, peer: int, end: float) -> PairFinding:
        try:
            outcome, seconds = bounded(lambda: self._collectives(task, number, peer, end), end - time.monotonic())
        except (RuntimeError, TimeoutError) as error:
            return PairFinding(peer=peer, outcome="failed", error=cause_of(error)[:_CAUSE_CHARS])
        return PairFinding(peer=peer, outcome=outcome, seconds=seconds)

    def _collectives(self, task: HelperTask, number: int, peer: int, end: float) -> tuple[str, float]:
        index, store = int(task.rank > peer), self._store
        timeout = timedelta(seconds=max(0.1, end - time.monotonic()))
        if index == 1:
            host = task.peers[peer]
            store = TCPStore(
                host.address, host.store_port, None, False, timeout, wait_for_workers=False, use_libuv=uses_libuv()
            )
        prefix = f"{task.token}/{number}/{min(task.rank, peer)}"
        group: Any = ProcessGroupGloo(PrefixStore(prefix, store), index, 2, timeout)
        group.barrier().wait(timeout)
        started = time.perf_counter()
        for numel in _SIZES:
            pattern = torch.arange(numel, dtype=torch.float64) % 7 + 1
            tensor = pattern * (task.rank + 1)
            group.allreduce(tensor).wait(timeout)
            if not torch.equal(tensor, pattern * (task.rank + peer + 2)):
                return "wrong", time.perf_counter() - started
        return "ok", time.perf_counter() - started


def sums_are_right(device: torch.device) -> bool:
    """Return whether this device computes products of integers correctly."""
    size = 256
    row = torch.arange(size, dtype=torch.float64, device=device) % 7 + 1
    matrix = row.repeat(size, 1)
    for factor in range(1, 4):
        # Every element of row i, column j is (sum of the row) * row[j].
        expected = row.cpu().sum().item() * factor * row.cpu()
        if not torch.equal((matrix * factor @ matrix).cpu(), expected.repeat(size, 1)):
            return False
    return True


def _try_link(peer: HelperAddress, token: str, end: float) -> tuple[bool, float | None]:
    """Return whether the peer was reached, and the round-trip time of a block in seconds."""
    while True:
        left_s = end - time.monotonic()
        if left_s <= 0:
            return False, None
        try:
            connection = socket.create_connection((peer.address, peer.link_port), timeout=left_s)
            break
        except TimeoutError:
            return False, None
        except OSError:  # refused while the peer starts, or no route at all
            time.sleep(min(0.1, left_s))
    with connection, contextlib.suppress(OSError):
        started = time.perf_counter()
        block = bytes(BLOCK_BYTES)
        connection.settimeout(max(0.01, end - time.monotonic()))
        connection.sendall(token.encode() + block)  # the peer reads all of it before it answers
        if _receive(connection, BLOCK_BYTES, end) == block:
            return True, time.perf_counter() - started
    return True, None


def _receive(connection: socket.socket, num_bytes: int, end: float) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        connection.settimeout(max(0.01, end - time.monotonic()))
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            break
        data += chunk
    return bytes(data)


def _echo(connection: socket.socket, token: bytes) -> None:
    end = time.monotonic() + _LIFE_S
    with connection, contextlib.suppress(OSError):
        if hmac.compare_digest(_receive(connection, len(token), end), token):
            connection.sendall(_receive(connection, BLOCK_BYTES, end))


def serve(address: str, source: TextIO, sink: TextIO) -> None:
    """Print the helper's address, read its task, run it and print the findings, each as a line of JSON."""
    helper = Helper(address)
    print(json.dumps(asdict(helper.address)), file=sink, flush=True)
    line = source.readline()
    if line:
        print(json.dumps(asdict(helper.run(HelperTask.from_json(line)))), file=sink, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ending = threading.Timer(_LIFE_S, os._exit, (1,))
    ending.daemon = True
    ending.start()
    serve(sys.argv[1], sys.stdin, sys.stdout)
    os._exit(0)  # threads may still wait for a peer
