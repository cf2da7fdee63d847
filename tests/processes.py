"""Runs a function in N real processes with a hard limit, and leaves none behind; finds those of Ray Train and files left."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch  # imported once here, so that forked children need not

# In the environment of all that a program of the tests starts.
_RUN = "RAY_FRACBACKEND_TEST_RUN"


def free_port() -> int:
    """A TCP port that was free on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
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


def train_worker_processes(above: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes of Ray Train workers below a process, by default of this one's own Ray, oldest first."""
    found = []
    for process in (above or psutil.Process()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one may end meanwhile
            named = "RayTrainWorker" in process.name() + " ".join(process.cmdline())
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found, key=lambda each: each[:2])]


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


def run_processes(
    function: Any, num_processes: int, *args: Any, timeout_s: float = 60.0, needed: Sequence[int] | None = None
) -> list[Any]:
    """Calls ``function(rank, num_processes, port, *args)`` in forked processes.

    Args:
        function: What each process calls.
        num_processes: How many there are.
        args: Further arguments, equal for all.
        timeout_s: How long to wait for their answers, in seconds.
        needed: Ranks to wait for, by default all; the others are killed then.

    Returns:
        What each rank returned, its exception where it raised one, or None where it ended or hung without an answer.
    """
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_call, args=(answers, function, rank, num_processes, port, args), daemon=True)
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
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


def _call(answers: Any, function: Any, rank: int, num_processes: int, port: int, args: tuple[Any, ...]) -> None:
    # A thread pool that torch made in the parent is not there after the fork: a parallel region would wait for it for ever.
    torch.set_num_threads(1)
    try:
        value = function(rank, num_processes, port, *args)
    except Exception as error:
        traceback.print_exc()
        value = error
    answers.put((rank, value))
