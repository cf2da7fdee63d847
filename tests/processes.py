"""Run functions in real processes with a time limit and leave none behind; find processes of Ray Train and left files."""

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

# Environment variable of everything that a program of the tests starts.
_RUN = "RAY_FRACBACKEND_TEST_RUN"
# Child processes are not forked from the tests' own process, where another thread may hold a lock (such as libc's while
# it resolves a name), so the child would wait forever. They are forked from a process that has imported what most of
# them need and has started no threads. Windows has no fork; a child imports everything there.
CONTEXT: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
if sys.platform != "win32":
    CONTEXT.set_forkserver_preload(
        ["torch.distributed.optim", "torch.distributed.checkpoint", "torch._dynamo", "pytest", "ray_fracbackend.staged"]
    )
# A child imports the test's module before the time limit of a run starts.
_IMPORTS_S = 120.0
# Code for a child that waits for a signal, up to a minute. Python calls a signal's handler between two instructions: a
# signal just before a long sleep would be handled only after it.
NAPS = "[time.sleep(0.1) for _ in range(600)]"
# Exit code of a killed process.
_KILLED = -getattr(signal, "SIGKILL", signal.SIGTERM)
# Sockets of `free_port`, the newest ones: more than a test requests.
_held: deque[socket.socket] = deque()
_MAX_HELD = 32


def under_wine() -> bool:
    """Return whether the Windows API is Wine's, which differs from Windows in places."""
    return sys.platform == "win32" and hasattr(ctypes.windll.ntdll, "wine_get_version")


def loopback_name() -> str:
    """Return the name of the loopback interface: lo on Linux, which Gloo also knows by this name."""
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == "127.0.0.1" for each in addresses)
    )


_WITH_SIGNALS = """
import os, signal, sys
for number in signal.SIGINT, signal.SIGHUP:
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def with_signals(*command: str | os.PathLike[str]) -> list[str]:
    """Return a command that SIGINT and SIGHUP end, also if a shell or nohup ignores them for background jobs.

    preexec_fn is not used, because subprocess then runs the fork handlers of libraries: a process that had been
    connected to Ray and had run a V2 trainer then waited forever for Ray (2.60.0).
    """
    arguments = [os.fspath(each) for each in command]
    if sys.platform == "win32":
        return arguments
    return [sys.executable, "-ISc", _WITH_SIGNALS, *arguments]


def python_path() -> str:
    """Return PYTHONPATH for a program of the tests: the project, and this process's path, which may contain Ray."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))


def free_port() -> int:
    """Return a TCP port that is free on all addresses.

    On Linux it stays free for a while: a bound socket keeps the system from assigning it to another process, but a
    process that sets SO_REUSEADDR can listen there, as the stores of torch, Ray and this package do.
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
    """Wait until a process listens on the port on loopback. torch's store client sleeps longer after each attempt."""
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
    """Return whether a condition of other processes becomes true in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def train_worker_processes(above: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the Ray Train worker processes below a process, by default below this one's own Ray, oldest first."""
    return actor_processes("RayTrainWorker", above)


def actor_processes(name: str, above: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the processes of actors of a class below a process, by default below this one's own Ray, oldest first."""
    found, pids = [], _pids_of_actors(name) if sys.platform == "win32" and above is None else set()
    for process in (above or psutil.Process()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one may end meanwhile
            named = process.pid in pids or name in process.name() + " ".join(process.cmdline())
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found, key=lambda each: each[:2])]


def _pids_of_actors(name: str) -> set[int]:
    # Windows shows no process titles, but Ray has a table of its actors. A process may outlive its actor there.
    from ray._private import state

    alive = [actor for actor in state.actors().values() if actor["State"] != "DEAD"]
    return {actor["Pid"] for actor in alive if name in actor["ActorClassName"]}


def processes_with(variable: str, text: str) -> list[psutil.Process]:
    """Return living processes, without this one, that have a text in an environment variable: a mark of a test."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # a process of the system, or ended meanwhile
            is_other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_other and text in process.environ().get(variable, ""):
                found.append(process)
    return found


def mark_processes() -> None:
    """Mark everything that this process starts from now on for ``left_files``, also after its parent has ended."""
    os.environ[_RUN] = uuid.uuid4().hex


def shared_files() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def left_files(before: set[str]) -> set[str]:
    """Return new names in /dev/shm, without those that a living process of another program has mapped.

    Processes of this program are those below this one, and those started since ``mark_processes``.
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
    """Return a daemon process of `CONTEXT` that will call a function, with the current environment of this process."""
    return CONTEXT.Process(target=_in_environment, args=(dict(os.environ), function, args), daemon=True)


def _in_environment(environment: dict[str, str], function: Any, args: tuple[Any, ...]) -> None:
    # The forking process still has the variables that an earlier test set.
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


@dataclass
class Outcome:
    """Result of one process: `value` if its function returned, `error` and `trace` if it raised, `exitcode` otherwise."""

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
        function: A function at module level, so it can be pickled.
        calls: Arguments, by rank.
        limit_s: Time limit in seconds for all of them, after the processes have imported what they need. A rank that is
            still running then has exitcode -SIGKILL and error TimeoutError.
        needed: Ranks to wait for, by default all; the others are killed afterwards.
        fresh: Variables by rank for new interpreters, which have them before anything is imported.
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
    with suppress(threading.BrokenBarrierError):  # a child that did not reach the barrier has no answer
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
    # Plain pickle, because multiprocessing's would pass tensors as descriptors of a process that is ending.
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()
    # Skip interpreter teardown, which may take long in a rank with a broken Gloo group.
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
    """Call ``function(rank, num_processes, port, *args)`` in new processes with the environment of this one.

    Args:
        function: Function for each process, at module level, so it can be pickled.
        num_processes: Number of processes.
        args: Further arguments, equal for all processes.
        timeout_s: As in `run_each`.
        needed: As in `run_each`.

    Returns:
        For each rank the returned value, the exception that it raised, or None if it ended or hung without an answer.
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
    import torch  # only here, because most tests that use this module do not need it

    torch.set_num_threads(1)  # the processes share few cores
    return function(rank, num_processes, port, *args)
