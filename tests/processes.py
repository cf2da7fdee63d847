"""Runs functions in real processes with a hard limit, and leaves none behind; finds those of Ray Train and files left."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

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
# Code for a child that waits for a signal, up to a minute. Python calls a signal's handler between two instructions: one that comes
# in the moment before a long sleep begins is handled when that sleep is over.
NAPS = "[time.sleep(0.1) for _ in range(600)]"
# Exit code of a process that was killed.
_KILLED = -getattr(signal, "SIGKILL", signal.SIGTERM)
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


@dataclass
class Outcome:
    """What one process did: `value` if its function returned, `error` and `trace` if that raised, `exitcode` otherwise."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0

    @property
    def returned(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exitcode is None


def run_each(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    limit_s: float,
    *,
    needed: Collection[int] | None = None,
    fresh: Sequence[Mapping[str, str]] | None = None,
) -> list[Outcome]:
    """Call a function in one new process for each tuple of arguments; kill what is left at the end.

    Args:
        function: At module level, so that it pickles.
        calls: Arguments, by rank.
        limit_s: Seconds for all of them, once the processes have imported what they need. A rank that is still running then has
            exitcode -SIGKILL and error TimeoutError.
        needed: Ranks to wait for, by default all; the others are killed then.
        fresh: Start new interpreters, which have these variables, by rank, before anything is imported.
    """
    pipes: dict[Connection, int] = {}
    processes = []
    imported = CONTEXT.Barrier(len(calls) + 1)
    for rank, arguments in enumerate(calls):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        if fresh is None:
            process = new_process(_answer, imported, sender, function, arguments)
        else:
            start = multiprocessing.get_context("spawn").Process
            process = start(target=_answer, args=(imported, sender, function, arguments), daemon=True)
        with mock.patch.dict(os.environ, fresh[rank] if fresh is not None else {}):
            process.start()
        sender.close()
        pipes[receiver] = rank
        processes.append(process)
    with suppress(threading.BrokenBarrierError):  # a child that did not come so far has no answer
        imported.wait(_IMPORTS_S)
    outcomes = [Outcome(rank) for rank in range(len(calls))]
    waited_for = set(range(len(calls)) if needed is None else needed)
    end = time.monotonic() + limit_s
    while waited_for & set(pipes.values()) and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(pipes), timeout=left):
            _collect(pipe, outcomes[pipes.pop(pipe)])
    for rank in pipes.values():
        outcomes[rank].error = TimeoutError(f"rank {rank} was still running after {limit_s} s")
    for process in processes:
        process.join(0.0 if pipes else 5.0)
        if process.is_alive():
            process.kill()
            process.join()
    for rank, process in enumerate(processes):
        if process.exitcode and outcomes[rank].exitcode is not None:
            outcomes[rank].exitcode = process.exitcode
    return outcomes


def _answer(imported: Any, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with suppress(threading.BrokenBarrierError):
        imported.wait(_IMPORTS_S)
    started = time.monotonic()
    try:
        value = function(*arguments)
        message: tuple[Any, ...] = ("value", value, time.monotonic() - started)
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(repr(error))
        message = ("error", error, traceback.format_exc(), time.monotonic() - started)
    # Plain pickle: the one of multiprocessing would hand tensors over as descriptors of a process that is ending.
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()
    # Skip interpreter teardown: a rank that holds a broken Gloo group may take long there.
    os._exit(0)


def _collect(pipe: Connection, outcome: Outcome) -> None:
    try:
        message = pickle.loads(pipe.recv_bytes())
    except EOFError:
        outcome.exitcode = _KILLED
        return
    if message[0] == "value":
        outcome.value, outcome.seconds = message[1:]
    else:
        outcome.error, outcome.trace, outcome.seconds = message[1:]


def run_processes(
    function: Any, num_processes: int, *args: Any, timeout_s: float = 60.0, needed: Sequence[int] | None = None
) -> list[Any]:
    """Calls ``function(rank, num_processes, port, *args)`` in new processes with the environment of this one.

    Args:
        function: What each process calls, at module level, so that it pickles.
        num_processes: How many there are.
        args: Further arguments, equal for all.
        timeout_s: As `run_each` has it.
        needed: As `run_each` has it.

    Returns:
        What each rank returned, its exception where it raised one, or None where it ended or hung without an answer.
    """
    port = free_port()
    calls = [(function, rank, num_processes, port, args) for rank in range(num_processes)]
    answers = []
    for outcome in run_each(_on_one_thread, calls, timeout_s, needed=needed):
        if outcome.trace:
            print(outcome.trace, file=sys.stderr)
        hung = isinstance(outcome.error, TimeoutError) and not outcome.trace
        answers.append(outcome.value if outcome.returned or hung else outcome.error)
    return answers


def _on_one_thread(function: Any, rank: int, num_processes: int, port: int, args: tuple[Any, ...]) -> Any:
    import torch  # only here: most tests that use this module have no need of it

    torch.set_num_threads(1)  # the processes share few cores
    return function(rank, num_processes, port, *args)
