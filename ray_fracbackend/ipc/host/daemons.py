"""Daemon threads that the interpreter's exit waits for, a moment long. Standard library only.

Python ends its daemon threads in the middle of what they do, and torch's C++ ends the process with SIGABRT if that is one of its
operations. A thread that is not a daemon would keep the process for as long as a peer does not answer.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

# How long the interpreter's exit waits for all of them together.
EXIT_S = 1.0

_running: dict[threading.Thread, Callable[[], None] | None] = {}


def start_daemon(function: Callable[[], None], name: str, stop: Callable[[], None] | None = None) -> threading.Thread:
    """Run a function in a daemon thread.

    Args:
        function: Runs in the thread.
        name: For debuggers.
        stop: Called at the interpreter's exit if the thread still runs, to have it end soon.
    """

    def run() -> None:
        try:
            function()
        finally:
            del _running[thread]

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = stop
    thread.start()
    return thread


@atexit.register
def _settle() -> None:
    deadline = time.monotonic() + EXIT_S
    # In a forked child those of its parent are not alive.
    running = [(thread, stop) for thread, stop in tuple(_running.items()) if thread.is_alive()]
    for _, stop in running:
        if stop is not None:
            stop()
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))
