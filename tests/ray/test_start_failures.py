"""Failing starts: the error names the rank, comes in time, and nothing is left."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass

import psutil
import pytest
import torch
from packaging.version import Version
from ray.exceptions import RayActorError

from ray_fracbackend import (
    FracBackendError,
    OutOfMemoryError,
    RendezvousError,
    StartTimeoutError,
    VerificationError,
    WorkerDiedError,
)
from ray_fracbackend._ray import worker_addresses
from ray_fracbackend.start import backend as backend_module
from ray_fracbackend.start.isolation.search import with_faults
from tests.processes import free_port, wait_until
from tests.ray.starts import START_S, replace_in_worker, start
from tests.unit.builders import worker_plan

_WINDOWS = sys.platform == "win32"
# It destroys a Gloo group, there also one whose collective nobody answers, only after the start's time.
_WAITS = _WINDOWS and Version(torch.__version__) < Version("2.8")


@dataclass(frozen=True)
class Failure:
    """Properties of an error that has been freed."""

    kind: type[BaseException]
    text: str
    ranks: tuple[int, ...]
    is_own_cause: bool


def failure_of(group, **settings):
    """Return the properties of a start's error, not the error itself, so that everything it referenced is freed."""
    try:
        start(group, **settings)
    except FracBackendError as error:
        # V1 follows the causes to their end.
        return Failure(type(error), str(error), error.ranks, is_own_cause=error.__cause__ is error)
    raise AssertionError("the start did not fail")


@contextlib.contextmanager
def stalls_of_this_process():
    """Collect the seconds in which this process did not run, as on a machine that pauses: no start can end then."""
    stalls, is_over = [], threading.Event()

    def look():
        last = time.monotonic()
        while not is_over.wait(0.1):
            now = time.monotonic()
            stalls.extend([now - last] if now - last > 1 else [])
            last = now

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield stalls
    finally:
        is_over.set()
        thread.join()


def failed_start(group, error, match, **settings):
    """A start that fails; its error holds no frame that references the worker group.

    Otherwise the workers would live until the next garbage collection.
    """
    settings = {"start_timeout_s": START_S, **settings}
    gc.collect()
    gc.disable()
    started = time.monotonic()
    try:
        with stalls_of_this_process() as stalls:
            failure = failure_of(group, **settings)
        elapsed_s = time.monotonic() - started
        assert [each for each in gc.get_objects() if isinstance(each, backend_module.Start)] == []
    finally:
        gc.enable()
    assert elapsed_s - sum(stalls) < settings["start_timeout_s"] + 10  # the design's time limit
    assert not failure.is_own_cause
    assert issubclass(failure.kind, error), failure
    assert re.search(match, failure.text), failure
    return failure


@pytest.mark.full(but="win32")
def test_rank_that_never_answers(make_group):
    """A worker that is stuck in another call is named with its node, and the others do not wait longer than the time limit."""
    group = make_group(2)
    group.execute_single_async(1, time.sleep, 3600)
    failure = failed_start(
        group, StartTimeoutError, r"rank 1 \(node .*, pid \d+\) did not answer \(probing", start_timeout_s=2
    )
    assert failure.ranks == (1,)


@pytest.mark.parametrize("step", [pytest.param("_init_process_group", marks=pytest.mark.full), "verify_process_group"])
def test_rank_killed_during_start(make_group, step):
    """A dead worker is named at once; with V1 not as a RayActorError, which would not reach the user."""
    group = make_group(2)
    group.execute_single(1, replace_in_worker, "ray_fracbackend.worker.process_group", step, "kill")
    failure = failed_start(group, WorkerDiedError, r"rank 1 \(node .*\) died during start-up \(starting gloo at")
    assert not issubclass(failure.kind, RayActorError)
    assert failure.ranks == (1,)


@pytest.mark.skipif(_WAITS, reason="needs torch 2.8 on Windows: before it, the rank that waits does not answer either")
@pytest.mark.parametrize(
    ("step", "how"),
    [
        pytest.param("verify_process_group", "sleep", marks=pytest.mark.full(but="win32")),
        pytest.param("verify_process_group", "stop", marks=pytest.mark.full),
        pytest.param("_init_process_group", "stop", marks=pytest.mark.full),
    ],
)
def test_rank_that_hangs_during_start(make_group, step, how):
    """A worker that hangs in the middle is named, not the workers that wait for it; afterwards no process and no port is left."""
    group = make_group(2)
    pids = [worker.metadata.pid for worker in group.workers]
    port = free_port()
    group.execute_single(1, replace_in_worker, "ray_fracbackend.worker.process_group", step, how)
    failure = failed_start(
        group,
        (RendezvousError, VerificationError),
        r"rank 1 \(node .*did not answer",
        master_port=port,
        start_timeout_s=5,
    )
    assert failure.ranks == (1,)
    group.shutdown(patience_s=0)
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
        listener.bind(("", port))
        listener.listen()


@pytest.fixture
def breakable(request):
    """The module's pair. On Windows two separate workers: Gloo does not notice there that a peer has left its group, and the start ends the
    rank that waits for it.
    """
    return request.getfixturevalue("make_group")(2) if _WINDOWS else request.getfixturevalue("pair")


def test_out_of_memory_is_reported_as_such(breakable):
    """A full device is named with its rank. The rank that waited for it does not hide it, and there is no search."""
    breakable.execute_single(
        1, replace_in_worker, "ray_fracbackend.worker.process_group", "verify_process_group", "starve", 1
    )
    failure = failed_start(
        breakable,
        OutOfMemoryError,
        r"^rank 1 \(node .*ran out of device memory .*Tried to allocate",
        start_timeout_s=60,
    )
    assert failure.ranks == (1,)


def test_environment_is_restored(pair):
    """A failed start leaves no variable behind."""
    before = pair.execute(lambda: dict(os.environ))
    pair.execute(replace_in_worker, "ray_fracbackend.worker.process_group", "verify_process_group", "raise", 1)
    failed_start(pair, RendezvousError, "the disk is on fire")
    assert pair.execute(lambda: dict(os.environ)) == before


@pytest.mark.full
def test_the_search_names_a_silent_rank_and_then_a_dead_one(make_group):
    """A worker that is stuck in another call does not answer. A worker that is gone makes it the error of a dead worker."""
    group = make_group(3)
    plans = [worker_plan(rank=rank, world_size=3) for rank in range(3)]
    error = VerificationError("barrier failed.", ranks=[0], kind="stalled", step="starting gloo")
    addresses = worker_addresses(group)
    group.execute_single_async(1, time.sleep, 3600)
    found = with_faults(error, group, plans, addresses, 60)
    assert (type(found), found.ranks) == (VerificationError, (0, 1))
    assert f"Search for the fault: no answer from {addresses[1].text}: " in str(found)
    os.kill(addresses[2].pid, signal.SIGKILL)
    found = with_faults(error, group, plans, addresses, 60)
    assert (type(found), found.ranks) == (WorkerDiedError, (2,))
