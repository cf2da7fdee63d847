"""A group and other parts of its process: a forked child, an earlier group, autograd, signals, torch's own switches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ipc_harness import Job, run_ranks, values

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)
from ray_fracbackend.ipc.group.executor import Executor


def in_child(function: Any) -> str:
    """Return the result of a function in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def used_in_child(job: Job) -> tuple[list[str], list[float]]:
    """Return a forked child's error for each use of the group, and the parent's results after each."""
    job.init()
    queued = dist.all_reduce(torch.ones(1), async_op=True)
    queued.wait()
    uses = [
        lambda: dist.all_reduce(torch.full((1,), 100.0)),
        lambda: dist.all_reduce(torch.full((1,), 100.0), async_op=True).wait(),
        lambda: dist.barrier(),
        lambda: dist.group.WORLD.abort(),
        lambda: dist.destroy_process_group(),
    ]
    texts, sums = [], []
    for use in uses:
        texts.append(in_child(use))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sums.append(tensor.item())
    return texts, sums


def test_a_forked_child_cannot_use_its_parents_group() -> None:
    """The child gets an error, and neither its call nor the end of its copy reaches the parent's group."""
    for texts, sums in values(run_ranks(used_in_child, 2)):
        assert all("forked from it: call collectives in the parent" in text for text in texts[:3]), texts
        assert texts[3:] == ["None", "None"]
        assert sums == [2.0] * 5


def waited_for_in_child(job: Job) -> tuple[list[str], float]:
    """Return the error of a forked child that waits for its parent's call, which continues."""
    job.init()
    dist.barrier()
    tensor = torch.ones(1)
    if job.rank == 1:
        time.sleep(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    waits = [lambda: work.wait(), lambda: work.wait(timedelta(seconds=0.2))]
    texts = [in_child(wait) for wait in waits] if job.rank == 0 else []
    work.wait()
    return texts, tensor.item()


def test_a_forked_child_cannot_wait_for_its_parents_call() -> None:
    """A time limit makes no difference."""
    (texts, result), other = values(run_ranks(waited_for_in_child, 2))
    assert all(text.startswith("GroupClosedError") for text in texts), texts
    assert len(texts) == 2
    assert (result, other) == (2.0, ([], 2.0))


def several_groups(job: Job) -> list[float]:
    """Create groups one after the other with one store, as with torchrun."""
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    sums = []
    for _ in range(3):
        dist.init_process_group("ipc", store=store, rank=job.rank, world_size=job.size)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.destroy_process_group()
    return sums


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import ray_fracbackend.ipc

dist.init_process_group("ipc", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1), async_op=True).wait()
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.full
def test_a_forked_child_ends() -> None:
    """A child at the end of its script does not wait for threads that only the parent has."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


EXIT_SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import ray_fracbackend.ipc

rank = int(sys.argv[1])
dist.init_process_group("ipc", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
tensor = torch.ones(1 << 20)
dist.all_reduce(tensor)
for _ in range(3):
    work = dist.all_reduce(tensor, async_op=True)
if rank == 0 and sys.argv[3] == "alone":
    dist.all_reduce(tensor, async_op=True)
"""


@pytest.mark.parametrize("last", ["together", pytest.param("alone", marks=pytest.mark.full)])
def test_a_process_may_end_in_the_middle_of_a_call(last: str, tmp_path: Path) -> None:
    """Calls that were not waited for, including one that no peer joins, do not end a script with SIGABRT."""
    command = [sys.executable, "-c", EXIT_SCRIPT]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store"), last]) for rank in (0, 1)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]


WATCHED_SCRIPT = """
import threading, time, types, torch
from ray_fracbackend.ipc.device.watch import DeviceWatch
from ray_fracbackend.ipc.host.liveness import Peer, start_time
import contextlib, os
matrix, begun = torch.ones(400, 400), threading.Event()
class Last:
    def query(self):
        for _ in range(40):
            matrix @ matrix
        begun.set()
        return True
peer = Peer(os.getpid(), start_time(os.getpid()))
engine = types.SimpleNamespace(rank=0, waiter=types.SimpleNamespace(peers=[peer]), has_left=lambda rank: False)
runtime = types.SimpleNamespace(allow_queries_while_capturing=lambda: None, on=lambda stream: contextlib.nullcontext())
stream = types.SimpleNamespace(runtime=runtime, stream=None, timeout_s=1e-9, last=Last())
import ray_fracbackend.ipc.device.watch as watch
watch._MIN_LOOK_S = 0.001
DeviceWatch([engine], stream, ["rank 0"], lambda: None)
begun.wait(60)
begun.clear()
begun.wait(60)
"""


@pytest.mark.full
def test_a_process_may_end_while_its_watch_asks_the_device() -> None:
    """The thread is in torch's C++ then, which would end the process with SIGABRT."""
    ended = [
        subprocess.run([sys.executable, "-c", WATCHED_SCRIPT], timeout=100, check=False).returncode for _ in range(3)
    ]
    assert ended == [0, 0, 0]


def test_a_store_can_be_used_again() -> None:
    """A second group with the store of an ended one does not read that group's data."""
    assert values(run_ranks(several_groups, 2)) == [[2.0] * 3] * 2


def gradients(job: Job) -> list[list[float]]:
    """Return gradients after a collective has written to tensors that autograd keeps, through detached tensors."""
    job.init()
    found = []
    for dense in (True, False):
        weight = torch.ones(3, requires_grad=True)
        product = weight * weight
        view = weight.detach() if dense else weight.detach()[::2]
        dist.broadcast(view, 0)
        product.sum().backward()
        assert weight.grad is not None
        found.append(weight.grad.tolist())
    for call in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.all_gather([t, torch.empty_like(t)], t.clone()),
        lambda t: dist.all_to_all_single(t, torch.ones(2)),
    ):
        x = torch.zeros(2, requires_grad=True)
        p = torch.sigmoid(x)
        before = p._version
        call(p.detach())
        found.append([float(p._version - before)])
    return found


def test_versions_of_tensors_stay() -> None:
    """As with Gloo and NCCL, a write to a detached tensor is not an error in the next backward pass."""
    assert values(run_ranks(gradients, 2)) == [[[2.0] * 3, [2.0] * 3, [0.0], [0.0], [0.0]]] * 2


def test_an_interrupt_is_for_the_thread_that_it_hit() -> None:
    """The thread that runs another's call raises the signal handler's error; that call has failed, later ones continue."""
    executor = Executor("test")
    executor._serve = lambda: None  # type: ignore[method-assign]  # no worker: the thread that waits runs the queue
    ran = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    first, second = executor.submit(interrupted), executor.submit(lambda: ran.append(1))
    with pytest.raises(KeyboardInterrupt):
        executor.finish(second)
    assert isinstance(first.error, KeyboardInterrupt)
    assert not second.is_done()
    executor.finish(second)
    assert (second.error, ran) == (None, [1])


@pytest.mark.parametrize("how", ["run", "finish"])
def test_a_call_in_a_signal_handler_within_a_call_is_an_error(how: str) -> None:
    """It would wait for itself forever."""
    executor = Executor("test")
    executor._serve = lambda: None  # type: ignore[method-assign]  # no worker: the thread that waits runs the queue
    ran: list[str] = []

    def handler() -> None:
        call = lambda: ran.append("inner")  # noqa: E731
        nested = {"run": lambda: executor.run(call), "finish": lambda: executor.finish(executor.submit(call))}
        with pytest.raises(RuntimeError, match="signal handler or finalizer called a collective"):
            nested[how]()
        assert not executor.close(0.1), "a call is in progress"
        ran.append("handler")

    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        executor.run(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    executor.run(lambda: ran.append("after"))
    assert ran == ["handler", *(["inner"] if how == "finish" else []), "after"]


def ended_by_a_signal(job: Job) -> str:
    """Return the error of a rank that waits for its second call when a handler exits."""
    job.init()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    if job.rank == 1:
        time.sleep(3.0)
        return ""
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(7))
    dist.all_reduce(torch.ones(1), async_op=True)
    second = dist.all_reduce(torch.ones(1), async_op=True)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        second.wait()
    except BaseException as error:
        return repr(error)
    return "nothing"


def test_a_handler_that_exits_ends_a_wait() -> None:
    """``wait()`` raises SystemExit, whichever call was in progress."""
    assert values(run_ranks(ended_by_a_signal, 2))[0] == "SystemExit(7)"


def limited_by_torch(job: Job) -> str:
    """Return the error of a call whose limit was set by torch's own function."""
    job.init()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    if job.rank == 1:
        time.sleep(2.0)
        return ""
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError as error:
        return f"{error}" if time.monotonic() - started < 2 else "too late"
    return "nothing"


def test_the_limit_of_torchs_own_function_counts() -> None:
    """``_set_pg_timeout`` sets the limit; the message has torch's wording."""
    text = values(run_ranks(limited_by_torch, 2))[0]
    assert "timed out" in text
    assert " timeout " in text


def devices(job: Job) -> list[str]:
    """Return the devices that a group claims."""
    job.init()
    return sorted(device.type for device in dist.group.WORLD._device_types)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_a_torch_without_cuda_has_no_group_for_cuda() -> None:
    """Otherwise torch uses CUDA as the device of the group's objects."""
    assert values(run_ranks(devices, 2)) == [["cpu"]] * 2
