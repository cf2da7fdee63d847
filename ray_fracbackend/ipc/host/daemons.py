"""Daemon threads for which the interpreter waits briefly at exit. Standard library only.

Python stops daemon threads at any point. If a thread is inside one of torch's C++ operations, torch ends the process
with SIGABRT. A thread that is not a daemon would keep the process alive as long as a peer does not answer.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

# Time for which the interpreter waits at exit, for all of these threads together.
EXIT_S = 1.0

_running: dict[threading.Thread, Callable[[], None] | None] = {}


def start_daemon(function: Callable[[], None], name: str, stop: Callable[[], None] | None = None) -> threading.Thread:
    """Run a function in a daemon thread.

    Args:
        function: The function to run.
        name: Name of the thread, for debuggers.
        stop: Called at the interpreter's exit if the thread still runs; must make it end soon.
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
    # In a forked child the threads of its parent are not alive.
    running = [(thread, stop) for thread, stop in tuple(_running.items()) if thread.is_alive()]
    for _, stop in running:
        if stop is not None:
            stop()
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))
