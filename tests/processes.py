"""Runs a function in N real processes with a hard limit, and leaves none behind; finds those of Ray Train and files left."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# In the environment of all that a program of the tests starts.
_RUN = "RAY_FRACBACKEND_TEST_RUN"
# Children are not forked from the tests' own process, where another thread may hold a lock at that moment (such as libc's while
# it resolves a name), for which the child would wait for ever. They come from a process that has imported what most of them
# need and has started no threads. Windows has no fork: a child there imports all anew.
CONTEXT: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
if sys.platform != "win32":
    CONTEXT.set_forkserver_preload(
        [
            "torch.distributed.optim",
            "torch.distributed.checkpoint",
            "torch._dynamo",
            "pytest",
            "ray_fracbackend.staged",
        ]
    )
# A child imports the test's module before the time limit of a run begins.
_IMPORTS_S = 120.0
# Sockets of `free_port`, the newest of them: more than a test asks for.
_held: deque[socket.socket] = deque()
_MAX_HELD = 32


def under_wine() -> bool:
    """Whether the Windows API is Wine's, which deviates from Windows in places."""
    return sys.platform == "win32" and hasattr(ctypes.windll.ntdll, "wine_get_version")


def loopback_name() -> str:
    """Name of the loopback interface: lo on Linux, which Gloo knows by this name too."""
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == "127.0.0.1" for each in addresses)
    )


_WITH_SIGNALS = """
import os, signal, sys
for number in signal.SIGINT, signal.SIGHUP:
    signal.signal(number, signal.Handlers(int(sys.argv[1])))
os.execv(sys.argv[2], sys.argv[2:])
"""


def with_signals(*command: str | os.PathLike[str], ignored: bool = False) -> list[str]:
    """A command that SIGINT and SIGHUP end, also where the tests run in the background of a shell or under nohup, which ignore them.

    Not by preexec_fn, for which subprocess runs the handlers that libraries have for a fork: a process that was connected to Ray and
    had run a V2 trainer waited for Ray without an end after it (2.60.0).
    """
    arguments = [os.fspath(each) for each in command]
    if sys.platform == "win32":
        return arguments
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    return [sys.executable, "-ISc", _WITH_SIGNALS, str(int(handler)), *arguments]


def python_path() -> str:
    """PYTHONPATH for a program of the tests: the project, and what this process has, from which Ray itself may come."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))


def free_port() -> int:
    """A TCP port that is free on all addresses.

    On Linux it stays so for a while: a bound socket keeps the system from giving it to another process, and lets one listen there
    that sets SO_REUSEADDR, as the stores of torch, Ray and this package do.
    """
    holder = socket.socket()
    if sys.platform != "win32":
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port: int = holder.getsockname()[1]
    _held.append(holder)
    if len(_held) > _MAX_HELD or sys.platform == "win32":
        _held.popleft().close()
    return port


def wait_for_port(port: int, timeout_s: float = 60.0) -> None:
    """Until something listens there on loopback. torch's store client sleeps longer between attempts the longer it waits."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=timeout_s).close()
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> bool:
    """Whether a condition comes true in time; for what other processes do meanwhile."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def train_worker_processes(above: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes of Ray Train workers below a process, by default of this one's own Ray, oldest first."""
    return actor_processes("RayTrainWorker", above)


def actor_processes(name: str, above: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes of actors of a class below a process, by default of this one's own Ray, oldest first."""
    found, pids = [], _pids_of_actors(name) if sys.platform == "win32" and above is None else set()
    for process in (above or psutil.Process()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one may end meanwhile
            named = process.pid in pids or name in process.name() + " ".join(process.cmdline())
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found, key=lambda each: each[:2])]


def _pids_of_actors(name: str) -> set[int]:
    # Windows shows no titles of processes, but Ray has a table of its actors, those that have ended included.
    from ray._private import state

    return {actor["Pid"] for actor in state.actors().values() if name in actor["ActorClassName"]}


def processes_with(variable: str, text: str) -> list[psutil.Process]:
    """Living processes, without this one, that have a text in an environment variable: those that a test has started, by a mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # of the system, or ended meanwhile
            is_other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_other and text in process.environ().get(variable, ""):
                found.append(process)
    return found


def mark_processes() -> None:
    """Makes what this process starts from now on known to ``left_files``, also after its parent has ended."""
    os.environ[_RUN] = uuid.uuid4().hex


def shared_files() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def left_files(before: set[str]) -> set[str]:
    """Names in /dev/shm that were not there before, without those that a living process of another program has mapped.

    Processes are of this program where they are below this one, or started since ``mark_processes``.
    """
    left = shared_files() - before
    if not left:
        return left
    this = psutil.Process()
    ours = {this.pid, *(child.pid for child in this.children(recursive=True))}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in ours and process.environ().get(_RUN, "") != os.environ[_RUN]:
                left -= {Path(each.path).name for each in process.memory_maps() if each.path.startswith("/dev/shm/")}
    return left


def new_process(function: Any, *args: Any) -> Any:
    """A daemon process of `CONTEXT` that is to call a function, with the environment that this process has now."""
    return CONTEXT.Process(target=_in_environment, args=(dict(os.environ), function, args), daemon=True)


def _in_environment(environment: dict[str, str], function: Any, args: tuple[Any, ...]) -> None:
    # It comes from a process that began with what an earlier test may have set.
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


def run_processes(
    function: Any, num_processes: int, *args: Any, timeout_s: float = 60.0, needed: Sequence[int] | None = None
) -> list[Any]:
    """Calls ``function(rank, num_processes, port, *args)`` in new processes with the environment of this one.

    Args:
        function: What each process calls, at module level, so that it pickles.
        num_processes: How many there are.
        args: Further arguments, equal for all.
        timeout_s: How long to wait for their answers once all have been started, in seconds.
        needed: Ranks to wait for, by default all; the others are killed then.

    Returns:
        What each rank returned, its exception where it raised one, or None where it ended or hung without an answer.
    """
    answers, imported = CONTEXT.Queue(), CONTEXT.Barrier(num_processes + 1)
    port = free_port()
    processes = [
        new_process(_call, answers, imported, function, rank, num_processes, port, args)
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    with suppress(threading.BrokenBarrierError):  # a child that did not come so far has no answer
        imported.wait(_IMPORTS_S)
    results: list[Any] = [None] * num_processes
    missing = set(range(num_processes)) if needed is None else set(needed)
    end = time.monotonic() + timeout_s
    while missing and time.monotonic() < end:
        try:
            rank, value = answers.get(timeout=0.2)
        except queue.Empty:
            missing -= {rank for rank in missing if not processes[rank].is_alive() and answers.empty()}
            continue
        results[rank] = value
        missing.discard(rank)
    for process in processes:
        process.kill()
        process.join()
    return results


def _call(
    answers: Any, imported: Any, function: Any, rank: int, num_processes: int, port: int, args: tuple[Any, ...]
) -> None:
    imported.wait(_IMPORTS_S)
    import torch  # only here: most tests that use this module have no need of it

    torch.set_num_threads(1)  # the processes share few cores
    try:
        value = function(rank, num_processes, port, *args)
    except Exception as error:
        traceback.print_exc()
        value = error
    answers.put((rank, value))
