"""Runs a function in N real processes with a hard limit, and leaves none behind."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import time
import traceback
from typing import Any

import torch  # noqa: F401  imported once here, so that forked children need not


def free_port() -> int:
    """A TCP port that was free on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_processes(function: Any, num_processes: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Calls ``function(rank, num_processes, port, *args)`` in forked processes.

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
    missing = set(range(num_processes))
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
    try:
        value = function(rank, num_processes, port, *args)
    except Exception as error:
        traceback.print_exc()
        value = error
    answers.put((rank, value))
