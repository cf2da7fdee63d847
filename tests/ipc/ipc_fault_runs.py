"""Run many injected faults in one set of processes, each in a separate process group.

Two processes survive all cases. The third takes the victim's part if the victim survives. If the victim is killed or stopped, it forks one
for each case and creates no process group itself, so forking stays safe.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from ipc_calls import SMALL_CHUNKS, Point, at_point, bare_group, memfd_count, open_files, points
from ipc_faults import BARRIER, SETUP_TIMEOUT_S, SIZE, TIMEOUT_S, Case
from ipc_harness import Job

from ray_fracbackend.ipc import IpcError, IpcProcessGroup
from ray_fracbackend.ipc.protocol.schedule import WRITTEN, Action

# Stopped ranks must be waited for, which costs time but no CPU, so this number of cases runs at once.
_STOPPED_AT_ONCE = 16
_PR_SET_PDEATHSIG = 1
_HOLD_S = 30.0

Error = tuple[str, str, float]


@dataclass
class Report:
    """Report of one rank on one case.

    Attributes:
        number: Number of the case.
        rank: Rank in the group.
        first: Class, message and seconds of the first error of its calls; an empty class if there was none.
        rest: The same for each later call: those already started, and a barrier at the end.
        leaks: Resources that were not released.
    """

    number: int
    rank: int
    first: Error
    rest: list[Error] = field(default_factory=list)
    leaks: dict[str, Any] = field(default_factory=dict)


class InjectedError(RuntimeError):
    """Represents any error inside a collective, such as a failed allocation."""


def error_of(function: Callable[[], Any]) -> Error:
    """Return class, message and seconds of the error of a call; an empty class if it returns."""
    started = time.monotonic()
    try:
        function()
    except IpcError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    except RuntimeError as error:
        return "RuntimeError", str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def strike(fault: str) -> None:
    """Kill or stop this process, or raise an error."""
    if fault == "raise":
        raise InjectedError("injected")
    if sys.platform == "win32":
        # It has no signals for these.
        this = psutil.Process()
        this.kill() if fault == "kill" else this.suspend()
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    # Another thread may have received the signal, and this thread must not continue until it stops too.
    time.sleep(3600)


def belongings() -> dict[str, Any]:
    """Return resources of this process that a process group may have allocated."""
    with open("/proc/self/maps") as maps:
        named = sum("/dev/shm/" in line for line in maps)
    return {
        "descriptors": len(open_files()),
        "threads": len(os.listdir("/proc/self/task")),
        "arenas": memfd_count(),
        "in /dev/shm": named + sum(name.startswith("/dev/shm/") for name in open_files()),
    }


def prepare(job: Job) -> dict[str, Any]:
    """Make garbage collection quick and return the resources of this process after one successful group."""
    torch.set_num_threads(1)
    os.environ.update(SMALL_CHUNKS)
    gc.collect()
    gc.freeze()
    pg = bare_group(job, f"prepare{job.rank}", 0, 1, SETUP_TIMEOUT_S)
    BARRIER(pg).wait()
    pg.shutdown()
    del pg
    gc.collect()
    return belongings()


def leaks_since(before: dict[str, Any]) -> dict[str, Any]:
    """Return resources beyond `before`; an ended thread may be listed for a moment longer."""
    gc.collect()
    deadline = time.monotonic() + 5
    while (now := belongings()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return {} if now == before else {"now": now, "before": before, "files": open_files()}


def survivors(job: Job, cases: list[Case]) -> list[Report]:
    """Run all cases on a surviving rank, one batch after the other."""
    before = prepare(job)
    store = _store(job)
    before["descriptors"] += 1
    reports = []
    for first, batch in batches(cases):
        groups = [_group(job, case, first + i) for i, case in enumerate(batch)]
        if len(batch) == 1:
            done = [_play(groups[0], batch[0], first)]
        else:
            with ThreadPoolExecutor(len(batch)) as pool:
                done = list(pool.map(_play, groups, batch, range(first, first + len(batch))))
        groups.clear()
        store.set(f"done/{first}/{job.rank}", "")
        done[0].leaks = leaks_since(before)
        reports += done
    return reports


def victims(job: Job, cases: list[Case]) -> list[str]:
    """Fork a victim for each case; return their problems."""
    torch.set_num_threads(1)
    os.environ.update(SMALL_CHUNKS)
    store = _store(job)
    wrong = []
    for first, batch in batches(cases):
        children = [_fork_victim(job, case, first + i) for i, case in enumerate(batch)]
        store.wait([f"done/{first}/{rank}" for rank in range(SIZE - 1)], timedelta(seconds=200))
        for case, pid in zip(batch, children, strict=True):
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if not os.WIFSIGNALED(status):
                wrong.append(f"{case}: the victim ended with {os.waitstatus_to_exitcode(status)}")
    return wrong


def play_fatal(job: Job, cases: list[Case]) -> Any:
    """Run either side of the cases whose victim does not survive."""
    return victims(job, cases) if job.rank == SIZE - 1 else survivors(job, cases)


def batches(cases: list[Case]) -> list[tuple[int, list[Case]]]:
    """Yield cases that run at once, each batch with the number of its first case."""
    at_once = _STOPPED_AT_ONCE if cases and cases[0].fault == "stop" else 1
    return [(first, cases[first : first + at_once]) for first in range(0, len(cases), at_once)]


def _store(job: Job) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=60))


def _fork_victim(job: Job, case: Case, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    # A stopped child must not outlive this process, however this process ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _play(_group(job, case, number), case, number)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _group(job: Job, case: Case, number: int) -> IpcProcessGroup:
    """Create the group of a case: the last process is the victim, the others are the other ranks in order."""
    others = [rank for rank in range(SIZE) if rank != case.victim]
    rank = [*others, case.victim][job.rank]
    os.environ["RAY_FRACBACKEND_IPC_HOST"] = case.hosts[rank]
    pg = bare_group(job, str(number), rank, SIZE, SETUP_TIMEOUT_S)
    # The victim of a batch is ready long before the others, and must not time out while it waits for them.
    pg.set_timeout(timedelta(seconds=TIMEOUT_S if rank == case.victim else case.timeout_s))
    return pg


def _play(pg: IpcProcessGroup, case: Case, number: int) -> Report:
    """Run this rank's part of a case."""
    is_victim = pg.rank() == case.victim
    calls = case.victim_calls if is_victim else case.calls
    if is_victim and case.fault in ("kill", "stop", "raise"):
        num_signs = 2 if calls[0].name.startswith("all_to_all") else 1
        at_point(pg, case.point, lambda: strike(case.fault), num_signs)
    if case.asynchronous:
        works = [call(pg, asynchronous=True) for call in calls]
        errors = [error_of(work.wait) for work in works]
        del works
    else:
        errors = []
        for position, call in enumerate(calls):
            _hold(pg, case, position)
            errors.append(error_of(lambda call=call: call(pg).wait()))
            if errors[-1][0]:
                break
    failed = next((i for i, error in enumerate(errors) if error[0]), None)
    if failed is None:
        report = Report(number, pg.rank(), ("", "", 0.0))
    else:
        report = Report(number, pg.rank(), errors[failed], errors[failed + 1 :])
        report.rest.append(error_of(lambda: BARRIER(pg).wait()))
    pg.shutdown()
    return report


def _hold(pg: IpcProcessGroup, case: Case, position: int) -> None:
    """Make sure that the ranks are at the case's position when they disagree."""
    if case.fault != "mismatch" or case.hosts != "aaa":
        return
    if case.peers == "earlier":
        if pg.rank() != case.victim and position == case.differs_at - 1:
            takes = [point for point in points(case.calls[position], SIZE) if point[0] is Action.TAKE]
            # A barrier has no chunks.
            _hold_at(
                pg,
                takes[-1] if takes else (Action.CHECK, 0),
                lambda: _step_of(pg, case.victim) > _step_of(pg, pg.rank()),
            )
        return
    if position != case.differs_at:
        return
    if pg.rank() == case.victim:
        if case.peers == "waiting":
            own = _step_of(pg, case.victim)
            _wait_until(lambda: all(_step_of(pg, rank) > own for rank in range(SIZE) if rank != case.victim))
    elif case.peers in ("SIGN", "PUT", "PUBLISH"):
        _hold_at(pg, (Action[case.peers], 0), lambda: _step_of(pg, case.victim) > _step_of(pg, pg.rank()))
    elif case.peers in ("AWAIT", "CHECK"):
        _hold_at(pg, (Action[case.peers], 0), lambda: pg._local.engine.control.poisoner() is not None)


def _hold_at(pg: IpcProcessGroup, point: Point, condition: Callable[[], bool]) -> None:
    at_point(pg, point, lambda: _wait_until(condition))


def _step_of(pg: IpcProcessGroup, rank: int) -> int:
    """Return the last chunk that the rank has written: between calls it is the same on all ranks."""
    control = pg._local.engine.control
    return control.words[control.counter_index[rank] + WRITTEN]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _HOLD_S
    while not condition():
        assert time.monotonic() < deadline, "the other side did not get there"
        time.sleep(0.0005)
