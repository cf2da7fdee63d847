"""End a process whose device would wait for a rank that has died. Runs in every rank; imports torch through its callers.

A stream that waits for an interprocess event of a dead process may wait for ever, or go on with whatever the memory holds: no
document says which. The host learns of the death in its next call of the group. But a process that waits for its device first, as
in ``loss.item()``, would hang there, or compute with garbage. So where a rank dies while a call with it is still on the device, and
no call of this process has raised since, the process ends, as under NCCL's watchdog.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence

from ..protocol.engine import Engine
from .runtime import CommunicationStream

logger = logging.getLogger(__name__)

# How long the process's own next call has to report the death first.
PATIENCE_S = 10.0
# Between looks at the peers where the system has no process descriptors (Linux before 5.3).
_LOOK_S = 1.0


class DeviceWatch:
    """A thread that looks after one group with device memory, until the group is closed.

    Args:
        engines: The group's engines, one for each kind of memory.
        stream: The group's stream.
        names: How messages call each rank.
    """

    def __init__(self, engines: Sequence[Engine], stream: CommunicationStream, names: Sequence[str]) -> None:
        self._engines = engines
        self._stream = stream
        self._names = names
        self._read, self._write = os.pipe()
        self._lock = threading.Lock()
        self._is_closed = self._is_over = False
        # Of the interpreter's exit nothing may wait for it.
        threading.Thread(target=self._run, name="ipc device watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching. May be called again."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                if not self._is_over:
                    # A forked child may hold a copy of this end: closing it alone would not wake the thread.
                    os.write(self._write, b"x")
                os.close(self._write)

    def _run(self) -> None:
        try:
            rank = self._wait_for_death()
            if rank is not None:
                self._report(rank)
        finally:
            with self._lock:
                self._is_over = True
                os.close(self._read)

    def _wait_for_death(self) -> int | None:
        """Return the local rank whose process ends without having left the group; None once the group is closed."""
        peers = dict(enumerate(self._engines[0].waiter.peers))
        del peers[self._engines[0].rank]
        with contextlib.ExitStack() as stack:
            poll, limit_ms = select.poll(), None
            poll.register(self._read, select.POLLIN)
            for peer in peers.values():
                try:
                    descriptor = os.pidfd_open(peer.pid)
                except (OSError, AttributeError):
                    limit_ms = _LOOK_S * 1e3
                    continue
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
            while True:
                for rank in [rank for rank, peer in peers.items() if not peer.is_alive()]:
                    if not self._engines[0].has_left(rank):
                        return rank
                    del peers[rank]
                    # Its descriptor stays readable: from here on, look at times.
                    poll, limit_ms = select.poll(), _LOOK_S * 1e3
                    poll.register(self._read, select.POLLIN)
                if any(descriptor == self._read for descriptor, _ in poll.poll(limit_ms)):
                    return None

    def _report(self, rank: int) -> None:
        """Poison the group, and end the process if it may wait for the device, or use what that computed."""
        what = f"{self._names[rank]} (pid {self._engines[0].waiter.peers[rank].pid}) died"
        if self._is_closed:
            return
        last = self._stream.last
        is_pending = last is not None and not last.query()
        for engine in self._engines:
            engine.fail(f"{what}.")
        if not is_pending:
            return
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self._is_closed or any(engine.has_raised for engine in self._engines):
                return
            time.sleep(0.05)
        text = (
            f"ray_fracbackend: {what} while a collective with it was on this process's device ({self._stream.runtime.device}): what "
            "the device computes is unknown, and waiting for it may never end. Ending this process, as torch does under NCCL. See "
            f"the log of {self._names[rank]} for the cause."
        )
        # Logging may be what the process is stuck in.
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGABRT)
