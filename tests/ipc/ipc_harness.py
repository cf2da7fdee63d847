"""Runs a function in several real processes with a hard time limit, and reports what each did."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils import backend_registration

from ray_fracbackend.worker.store import open_store
from tests.processes import CONTEXT, new_process

# The device of the tensors that a rank hands to collectives.
DEVICE_ENV_VAR = "IPC_TEST_DEVICE"
# The backend of the group that a rank makes: ipc or staged.
BACKEND_ENV_VAR = "IPC_TEST_BACKEND"

# What `fake_accelerator` needs; torch 2.9.1 does not have it yet.
TAKES_TYPES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
typed = pytest.mark.skipif(not TAKES_TYPES, reason="needs a torch that takes a device type from Python")

_WINDOWS = sys.platform == "win32"
# Exit code of a process that was killed.
_KILLED = -getattr(signal, "SIGKILL", signal.SIGTERM)


def open_local_store() -> dist.TCPStore:
    """A store on the loopback address alone, whose peers' names are in the hosts file: it asks no name server."""
    return open_store(host="127.0.0.1")


def rank_device() -> torch.device:
    """Where this rank's tensors belong."""
    return torch.device(os.environ.get(DEVICE_ENV_VAR, "cpu"))


def rank_backend() -> str:
    """Backend under test."""
    return os.environ.get(BACKEND_ENV_VAR, "ipc")


@dataclass
class Outcome:
    """What one rank did: `value` if it returned, `error` and `trace` if it raised, `exitcode` otherwise."""

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


@dataclass(frozen=True)
class Job:
    """One rank's view of a run: what `init` needs."""

    rank: int
    size: int
    port: int
    timeout_s: float

    def store(self) -> dist.TCPStore:
        """A client of the run's store."""
        return dist.TCPStore(
            "127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=60), use_libuv=not _WINDOWS
        )

    def init(self, backend: str | None = None) -> None:
        """Call ``init_process_group`` with a store that outlives every rank; by default for the backend of the run."""
        torch.set_num_threads(1)
        backend = backend or rank_backend()
        store = self.store()
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=self.timeout_s)
        )


def _child(
    function: Callable[..., Any], job: Job, args: tuple[Any, ...], env: dict[str, str], pipe: Connection
) -> None:
    faulthandler.enable()
    os.environ.update({**({} if _WINDOWS else {"GLOO_SOCKET_IFNAME": "lo"}), **env})
    if (seed := os.environ.get("FAKE_CUDA_SEED")) is not None:
        import fake_cuda

        fake_cuda.install(int(seed) + job.rank)
    if os.environ.get(DEVICE_ENV_VAR, "").startswith("fake"):
        import fake_accelerator

        fake_accelerator.install(job.rank)
    started = time.monotonic()
    try:
        value = function(job, *args)
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


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    limit_s: float = 120.0,
    timeout_s: float = 30.0,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] = {},  # noqa: B006 (read only)
    needed: int | None = None,
    fresh: bool = False,
) -> list[Outcome]:
    """Run ``function(job, *args)`` in `size` processes; kill what is left after `limit_s` seconds.

    Args:
        function: At module level, so that it pickles.
        size: Number of processes.
        args: Further arguments, equal for all.
        limit_s: Hard limit in seconds; a rank that is still running then has exitcode -SIGKILL and error TimeoutError.
        timeout_s: Collective timeout of the process group that `Job.init` makes.
        env: Environment variables, for all ranks or by rank.
        needed: Wait only for the first so many ranks, then kill the rest.
        fresh: Start new interpreters, which have the variables before torch is imported.
    """
    store = open_local_store()
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        variables = dict(env(rank) if callable(env) else env)
        job = Job(rank, size, store.port, timeout_s)
        if fresh:
            process = multiprocessing.get_context("spawn").Process(
                target=_child, args=(function, job, args, variables, sender), daemon=True
            )
        else:
            process = new_process(_child, function, job, args, variables, sender)
        with mock.patch.dict(os.environ, variables if fresh else {}):
            process.start()
        sender.close()
        pipes[receiver] = rank
        processes.append(process)
    outcomes = [Outcome(rank) for rank in range(size)]
    deadline = time.monotonic() + limit_s
    while (
        any(rank < (size if needed is None else needed) for rank in pipes.values())
        and (left := deadline - time.monotonic()) > 0
    ):
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


def values(outcomes: list[Outcome]) -> list[Any]:
    """Values of a run in which every rank had to return."""
    # All of them: what the first met is often a consequence.
    failed = [
        f"rank {outcome.rank}: exit {outcome.exitcode} after {outcome.seconds:.1f} s, {outcome.error!r}\n{outcome.trace}"
        for outcome in outcomes
        if not outcome.returned
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]
