"""Starts in plain processes on separate nodes with a fault at a random moment, followed by another start.

Without Ray: this process takes the driver's part, with our probe, plan, rendezvous and start. Needs root on Linux.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from net_nodes import Node, address
from net_starts import instructions, probe_workers

from ray_fracbackend import FracBackendError
from ray_fracbackend.decide.settings import Settings
from tests.soak import calls

NUM_NODES = 3
KINDS = ("none", "kill", "stop", "pause", "unplug", "drop")
PHASES = ("start", "train", "stop")
# Time limits of the package: for the start with the fault, for a collective, and for a start without one.
BUDGET_S, TIMEOUT_S, CALM_S = 10.0, 5.0, 60.0
# Tolerance beyond them: for the design of a start, and for a busy machine.
MARGIN_S = 10.0
_NUM_STEPS, _PAUSE_S = 60, 0.005
# Approximate duration of a phase, so that a random moment falls into it.
_PHASE_S = {"start": 0.4, "train": 0.8, "stop": 0.02}
# Gloo reports a lost or silent peer as RuntimeError.
_GLOO_WORDS = (
    "gloo",
    "Connection",
    "connection",
    "Timed out",
    "timed out",
    "Socket",
    "Broken pipe",
    "recvValue",
    "peer",
)


@dataclass(frozen=True)
class Strike:
    """A fault: its kind, phase, delay, target, and the time after which it is undone.

    ``kill``, ``stop`` and ``pause`` (a stop that ends) affect the process of ``rank``; ``unplug`` (a link without a cable) and ``drop`` (a
    firewall) affect the network of its node.
    """

    kind: str
    phase: str
    after_s: float
    rank: int
    for_s: float | None


@dataclass(frozen=True)
class StartRun:
    """One run: ranks on nodes, a backend, a fault."""

    backend: str
    nodes: tuple[int, ...]
    verify: bool
    strike: Strike

    @classmethod
    def random(cls, rng: random.Random) -> StartRun:
        num_nodes = rng.randint(1, NUM_NODES)
        num_ranks = rng.randint(max(2, num_nodes), 6)
        nodes = sorted([*range(num_nodes), *(rng.randrange(num_nodes) for _ in range(num_ranks - num_nodes))])
        kind = rng.choice(KINDS if num_nodes > 1 else KINDS[:4])
        phase = rng.choice(PHASES)
        lasts = kind == "pause" or (kind in ("unplug", "drop") and rng.random() < 0.5)
        strike = Strike(
            kind=kind,
            phase=phase,
            after_s=round(rng.uniform(0, _PHASE_S[phase]), 4),
            rank=rng.randrange(num_ranks),
            for_s=round(rng.uniform(0.05, 3), 2) if lasts else None,
        )
        return cls(rng.choice(("gloo", "ipc")), tuple(nodes), rng.random() < 0.8, strike)


def play(run: StartRun, nodes: Sequence[Node]) -> dict[str, Any]:
    """Run one run; ``problems`` is empty if all ranks succeeded or raised an expected error, in time, and left nothing."""
    with tempfile.TemporaryDirectory() as folder:
        played = _Played(run, nodes, Path(folder))
        try:
            played.both_attempts()
        finally:
            played.heal()
            for node in nodes:
                node.reset()
    played.problems += left_on(nodes)
    return {"answers": played.answers, "held": [str(held) for held in played.held], "problems": played.problems}


def left_on(nodes: Sequence[Node]) -> list[str]:
    """Return processes and listening sockets on nodes whose workers have ended."""
    end, found = time.monotonic() + MARGIN_S, ["?"]
    while found and time.monotonic() < end:
        found = [f"{node.hostname}: process {pid} is left" for node in nodes for pid in node.strangers()]
        for node in nodes:
            listening = node.execute("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
            found += [f"{node.hostname}: {line} is left" for line in listening if line.split()[3] == "0A"]
        time.sleep(0.05)
    return found


class _Played:
    """One run in progress."""

    def __init__(self, run: StartRun, nodes: Sequence[Node], folder: Path) -> None:
        self._run, self._nodes, self._folder = run, nodes, folder
        self._options = Settings(backend=run.backend)
        self._workers = [nodes[number].spawn(folder) for number in run.nodes]
        self._timers: list[threading.Timer] = []
        # Ranks that can no longer answer.
        self._struck: set[int] = set()
        self._has_struck = False
        self.problems: list[str] = []
        self.answers: list[dict[str, list[str]]] = []
        # What each rank holds at the end.
        self.held: list[Any] = []

    def both_attempts(self) -> None:
        """The attempt with the fault, and one by the remaining and new processes, which must succeed."""
        self._attempt(self._run.strike)
        self.heal()
        self._has_struck = False
        for rank in self._struck:
            self._workers[rank].kill()
            self._workers[rank] = self._nodes[self._run.nodes[rank]].spawn(self._folder)
        self._struck.clear()
        if self.problems:
            return
        self._attempt(None)
        self.held = self._ask(calls.held, [()] * len(self._workers), CALM_S)
        for rank, held in enumerate(self.held):
            if not isinstance(held, dict) or held["shared_memory"] or held["ports"]:
                self.problems.append(f"rank {rank} holds {held!r} after the last stop")

    def heal(self) -> None:
        """Undo at once the fault of the network or of a paused process."""
        while self._timers:
            timer = self._timers.pop()
            timer.cancel()
            timer.join()
        if self._has_struck:
            self._undo()

    def _attempt(self, strike: Strike | None) -> None:
        told: dict[str, list[str]] = {}
        self.answers.append(told)
        in_start = strike is not None and strike.phase == "start"
        budget_s, timeout_s = BUDGET_S if in_start else CALM_S, TIMEOUT_S if strike else CALM_S
        each = [()] * len(self._workers)
        plans, _ = instructions(
            probe_workers(self._workers, None, self._options),
            self._options,
            budget_s=budget_s,
            timeout_s=timeout_s,
            verify=self._run.verify,
        )
        self._phase("start", told, calls.start, [(plan,) for plan in plans], budget_s)
        if set(told["start"]) == {"good"}:
            self._phase("train", told, calls.train, [(_NUM_STEPS, _PAUSE_S)] * len(plans), timeout_s)
        self._phase("stop", told, calls.stop, each, TIMEOUT_S)

    def _phase(
        self, phase: str, told: dict[str, list[str]], function: Callable[..., Any], args: list[Any], bound_s: float
    ) -> None:
        strike = self._run.strike
        if len(self.answers) == 1 and strike.phase == phase and strike.kind != "none":
            self._later(strike.after_s, self._strike)
        found = self._ask(function, args, bound_s + MARGIN_S)
        told[phase] = [self._judged(phase, rank, answer) for rank, answer in enumerate(found)]

    def _ask(self, function: Callable[..., Any], args: Sequence[tuple[Any, ...]], bound_s: float) -> list[Any]:
        for worker, each in zip(self._workers, args, strict=True):
            with suppress(OSError):  # it has been killed
                worker.send(function, *each)
        end = time.monotonic() + bound_s
        return [self._answer(rank, end) for rank in range(len(self._workers))]

    def _answer(self, rank: int, end: float) -> Any:
        while True:
            try:
                found = self._workers[rank].answer(min(end, time.monotonic() + 0.05))
            except OSError:
                found = RuntimeError("the process died")
            if rank in self._struck or not isinstance(found, TimeoutError) or time.monotonic() >= end:
                return found

    def _judged(self, phase: str, rank: int, answer: Any) -> str:
        """Return the answer in a few words; an unexpected error is a problem."""
        if answer is None:
            return "good"
        if rank in self._struck:
            return "struck"
        text = f"{type(answer).__name__}: {str(answer)[:300]}"
        if not self._has_struck or not is_named(phase, answer):
            self.problems.append(f"attempt {len(self.answers)}, {phase}, rank {rank}: {text}")
        return text

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        self._timers.append(timer)
        timer.start()

    def _strike(self) -> None:
        strike = self._run.strike
        worker, node = self._workers[strike.rank], self._node_struck()
        self._has_struck = True
        if strike.kind in ("kill", "stop"):
            self._struck.add(strike.rank)
        if strike.kind == "unplug":
            node.ip_command("link", "set", "eth0", "down")
        elif strike.kind == "drop":
            chains = [
                f"add chain inet t {hook} {{ type filter hook {hook} priority 0; }}" for hook in ("input", "output")
            ]
            rules = ["add rule inet t input iifname eth0 drop", "add rule inet t output oifname eth0 drop"]
            node.execute("nft", "; ".join(["add table inet t", *chains, *rules]))
        else:
            os.kill(worker.pid, signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP)
        if strike.for_s is not None:
            self._later(strike.for_s, self._undo)

    def _undo(self) -> None:
        kind = self._run.strike.kind
        if kind == "unplug":
            address(self._node_struck(), "eth0")
        elif kind == "drop":
            self._node_struck().execute("nft", "flush", "ruleset")
        elif kind == "pause":
            with suppress(ProcessLookupError):
                os.kill(self._workers[self._run.strike.rank].pid, signal.SIGCONT)

    def _node_struck(self) -> Node:
        return self._nodes[self._run.nodes[self._run.strike.rank]]


def is_named(phase: str, error: Any) -> bool:
    """Return whether it is an error of this package, or, in training, one of c10d or Gloo."""
    if isinstance(error, FracBackendError):
        return phase != "stop"
    if phase != "train":
        return False
    of_gloo = type(error) is RuntimeError and any(word in str(error) for word in _GLOO_WORDS)
    return of_gloo or isinstance(error, dist.DistError)
