"""Runs in one network namespace: imports torch once, then forks a new process for every worker that a test requests.

Started as ``net_agent.py HOSTNAME`` in its own UTS namespace. Each line on stdin is ``SOCKET STDERR``: fork a worker that
connects to the Unix socket and logs to the file. A worker answers ``(module, function, args, env)`` with ``(ok, value)``.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import sys
import threading
from multiprocessing.connection import Client, Connection


def answer(connection: Connection) -> None:
    while True:
        try:
            module, function, args, env = connection.recv()
        except EOFError:
            return
        os.environ.update(env)
        try:
            value = True, getattr(importlib.import_module(module), function)(*args)
        except BaseException as error:
            value = False, portable(error)
        connection.send(value)


def portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    socket.sethostname(sys.argv[1])
    import net_calls  # noqa: F401  torch and ray, once

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    assert threading.active_count() == 1, "fork needs a process without threads"
    print("ready", flush=True)
    for line in sys.stdin:
        address, log = line.split()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 2)
            with Client(address, "AF_UNIX") as connection:
                connection.send(os.getpid())
                answer(connection)
            os._exit(0)


if __name__ == "__main__":
    main()
