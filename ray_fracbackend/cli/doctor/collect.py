"""Collect the report of a machine through a child process. Runs on the driver, and as a task on every node of a cluster.

This process itself imports neither torch nor Ray. If a stage crashes the child or does not answer in time, only its own values
are missing: another child runs the other stages.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from ray_fracbackend import __version__
from ray_fracbackend.cli.doctor.child import STAGES, Event, Request, own_values
from ray_fracbackend.cli.doctor.report import Failure, MachineInfo
from ray_fracbackend.decide.worker_info import WorkerInfo

_POLL_S = 0.1
# Time that a stage leaves for the others, which may have to import torch again.
_RESERVE_S = 10.0
# Less time than this is not divided.
_WHOLE_S = 2.0
# A process that is killed during a driver call may not end.
_KILLED_S = 1.0
_QUOTED_CHARS = 120


def reserve_s(left_s: float) -> float:
    """Return how many of the remaining seconds one step must leave for the others."""
    return min(_RESERVE_S, left_s / 2) if left_s > _WHOLE_S else 0.0


class Collector:
    """Collection of this machine's report; a context manager that leaves no process behind.

    Args:
        timeout_s: Time limit in seconds.
        node_id: Ray's id of the node, empty without Ray.
        node_ip: Ray's address of the node.
    """

    def __init__(self, timeout_s: float, node_id: str = "", node_ip: str = "127.0.0.1") -> None:
        self.done: set[str] = set()
        self.failures: dict[str, Failure] = {}
        self._end = time.monotonic() + timeout_s
        self._node_id, self._node_ip = node_id, node_ip
        self._found = own_values()
        self._child: _Child | None = None
        self._stage, self._since = "", time.monotonic()

    def __enter__(self) -> Collector:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def run(self, until: str = "") -> None:
        """Wait for the report.

        Args:
            until: Return when this stage has ended; by default when all have.
        """
        while until not in self.done and until not in self.failures and self._child is not None:
            try:
                at, event = self._child.events.get(timeout=_POLL_S)
            except queue.Empty:
                if (took_s := time.monotonic() - self._since) > self._limit_s():
                    self._failed(Failure("timeout", f"{took_s:.0f}" if took_s >= 1 else f"{took_s:.1f}"))
                continue
            if event is None:
                self._ended()
            else:
                self._take(at, event)

    def machine(self, ray_gpus: float | None = None) -> MachineInfo:
        """Return the report with the stages that have ended.

        Args:
            ray_gpus: num_gpus of the node in Ray.
        """
        own: dict[str, Any] = {"rank": 0, "node_id": self._node_id, "node_ip": self._node_ip}
        return MachineInfo(
            worker=WorkerInfo(**own, **self._found.worker),
            ray_gpus=ray_gpus,
            failures=self.failures,
            not_done=frozenset(STAGES) - self.done,
            **self._found.machine,
        )

    def _limit_s(self) -> float:
        """Return how long the current stage may take."""
        left_s = self._end - self._since
        return left_s - reserve_s(left_s)

    def _left(self) -> list[str]:
        """Return the stages that can still run."""
        left: list[str] = []
        for name, stage in STAGES.items():
            if name not in self.done and name not in self.failures and {*self.done, *left}.issuperset(stage.needs):
                left.append(name)
        return left

    def _start(self) -> None:
        left = self._left()
        self._stage, self._since = "", time.monotonic()
        if left and self._since < self._end:
            self._child = _Child(Request(tuple(left), frozenset(self.done), self._found, self._node_ip))

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _take(self, at: float, event: Event) -> None:
        self._stage, self._since = event.stage, at
        if event.error is not None:
            self.failures[event.stage] = Failure("error", event.error, event.missing)
        elif event.found is not None:
            self._found.update(event.found)
            self.done.add(event.stage)

    def _ended(self) -> None:
        """Handle the end of the child's output: all stages have ended, or the child died."""
        assert self._child is not None
        if self._left() and (cause := self._child.cause_of_death()) is not None:
            self._failed(Failure("crash", cause))
        else:
            self._stop()

    def _failed(self, failure: Failure) -> None:
        """Continue without the current stage of the child. Kill a child that has finished all stages but does not exit."""
        self._stop()
        if left := self._left():
            self.failures[self._stage if self._stage in left else left[0]] = failure
            self._start()


def collect_machine(
    timeout_s: float, node_id: str = "", node_ip: str = "127.0.0.1", ray_gpus: float | None = None
) -> MachineInfo:
    """Collect the report of this machine. Creates no CUDA context and no process group.

    Args:
        timeout_s: Time limit in seconds.
        node_id: Ray's id of the node, empty without Ray.
        node_ip: Ray's address of the node.
        ray_gpus: num_gpus of the node in Ray.
    """
    with Collector(timeout_s, node_id, node_ip) as collector:
        collector.run()
        return collector.machine(ray_gpus)


def collect_packed(*arguments: Any) -> tuple[str, bytes]:
    """Collect the report of this machine for a driver that may have another version of this package.

    Args:
        arguments: As for `collect_machine`.

    Returns:
        The version here, and the pickled `MachineInfo`: reports are pickled by the position of their fields, which another
        version could confuse.
    """
    return __version__, pickle.dumps(collect_machine(*arguments))


class _Child:
    """A process that runs stages.

    Attributes:
        events: Its messages with the time of arrival; None at its end.
    """

    def __init__(self, request: Request) -> None:
        self.events: queue.SimpleQueue[tuple[float, Event | None]] = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # stop() closes it
        # With the import path of this process: that of a Ray worker includes the driver's runtime environment.
        code = f"import sys; sys.path[:] = {sys.path!r}; from ray_fracbackend.cli.doctor.child import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        threading.Thread(target=self._talk, args=(request,), daemon=True).start()

    def _talk(self, request: Request) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(OSError):  # it died
            # Left open, because the child ends when this process ends.
            pickle.dump(request, stdin)
            stdin.flush()
        self._read(stdout)
        self.events.put((time.monotonic(), None))

    def _read(self, stdout: IO[bytes]) -> None:
        with suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
            while True:
                event: Event = pickle.load(stdout)
                self.events.put((time.monotonic(), event))

    def cause_of_death(self) -> str | None:
        """Return signal or exit code with the last line that the process wrote; None if it exited with code 0."""
        try:
            code = self._process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if code == 0:
            return None
        text = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                text = signal.Signals(-code).name
        said = self._last_line()
        return f"{text} ({said})" if said else text

    def _last_line(self) -> str:
        with suppress(OSError):
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").splitlines()
            return next((line.strip()[:_QUOTED_CHARS] for line in reversed(lines) if line.strip()), "")
        return ""

    def stop(self) -> None:
        """Kill it and all processes that it started."""
        with suppress(OSError):
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        self._errors.close()
