"""End a process if its device would wait forever for another rank. Runs in every rank; imports torch through its callers.

If another rank dies, the next call of the group raises an error on the host. But a process may wait for its device before that, for
example in ``loss.item()``: it would hang there, or compute with undefined values. So the process ends, as with NCCL's watchdog, if a
rank dies while a call with it is on the device and no call of this process has raised an error since. It also ends if the device does
not complete a call within the group's timeout, for example because another rank is stopped: no call would report that.

The documentation of CUDA does not define whether a stream that waits for a dead process waits forever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..host.daemons import start_daemon
from ..protocol.engine import Engine
from .runtime import CommunicationStream

# Time for the next call of this process to report the death first.
PATIENCE_S = 10.0
# Between two checks within that time.
_PAUSE_S = 0.05
# Between two checks of the peers and the device.
_LOOK_S = 0.5


class DeviceWatch:
    """A thread that watches one group with device memory until the group is closed.

    Args:
        engines: The group's engines, one for each kind of memory.
        stream: The group's stream.
        names: Name of each rank in messages.
        release: Ends the waits of the group's stream for other ranks.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        stream: CommunicationStream,
        names: Sequence[str],
        release: Callable[[], None],
    ) -> None:
        self._engines = engines
        self._stream = stream
        self._names = names
        self._release = release
        self._closed = threading.Event()
        # The call that was on the device at the last check, and for how long.
        self._seen: Any = None
        self._seen_s = 0.0
        start_daemon(self._run, "ipc device watch", self.close)

    def close(self) -> None:
        """Stop watching. Can be called repeatedly."""
        self._closed.set()

    def _run(self) -> None:
        runtime = self._stream.runtime
        runtime.allow_queries_while_capturing()
        # A thread begins on the first device, where asking for an event may make a context.
        with runtime.on(self._stream.stream):
            what = self._wait_for_fault()
            if what is not None:
                self._report(what)

    def _wait_for_fault(self) -> str | None:
        """Return what has happened: a rank's process has ended without having left the group, or the device is late. None once the group
        is closed.
        """
        engine = self._engines[0]
        peers = {rank: peer for rank, peer in enumerate(engine.waiter.peers) if rank != engine.rank}
        while True:
            for rank, peer in peers.items():
                if not peer.is_alive() and not engine.has_left(rank):
                    return f"{self._names[rank]} (pid {peer.pid}) died"
            timeout_s, started = self._stream.timeout_s, time.monotonic()
            if self._closed.wait(_LOOK_S):
                return None
            # A process that was stopped itself has not waited for its device meanwhile.
            if self._is_late(min(time.monotonic() - started, 2 * _LOOK_S), timeout_s):
                states = [f"{self._names[rank]} (pid {peer.pid}) is {peer.state()}" for rank, peer in peers.items()]
                return f"the device did not complete a collective within the group's timeout of {timeout_s:g} s ({', '.join(states[:4])})"

    def _is_late(self, elapsed_s: float, timeout_s: float) -> bool:
        """Return whether the device has been at one call for longer than the timeout; time since the last look is added."""
        self._seen_s += elapsed_s
        if not _is_pending(self._seen):
            self._seen, self._seen_s = self._stream.last, 0.0
        return self._seen_s > timeout_s

    def _report(self, what: str) -> None:
        """Poison the group, and end the process if it may wait for the device, or use what that computed."""
        if self._closed.is_set():
            return
        is_pending = _is_pending(self._stream.last)
        # A rank that failed has stored its reason in one of the memories before it ended.
        if not any(engine.waiter.is_poisoned() for engine in self._engines):
            for engine in self._engines:
                engine.fail(f"{what}.")
        if not is_pending:
            return
        end = time.monotonic() + PATIENCE_S
        while not any(engine.has_raised for engine in self._engines) and time.monotonic() < end:
            if self._closed.wait(_PAUSE_S):
                return
        if any(engine.has_raised for engine in self._engines):
            self._keep_released()
            return
        text = (
            f"ray_fracbackend: {what}. A collective is on {self._stream.runtime.device}: its results are unknown, and it may never "
            "complete. Ending this process, as torch does with NCCL. See the logs of the other ranks for the cause."
        )
        # The process may be stuck in a logging call.
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGABRT)

    def _keep_released(self) -> None:
        """End the waits of the stream until it has completed its work.

        Once is not enough: a rank that was stopped may continue, overwrite the word with an older step, and die.
        """
        while _is_pending(self._stream.last) and not self._closed.wait(_PAUSE_S):
            self._release()


def _is_pending(event: Any) -> bool:
    try:
        return event is not None and not event.query()
    except RuntimeError:  # the device is broken: the next CUDA call of the user raises an error
        return False
