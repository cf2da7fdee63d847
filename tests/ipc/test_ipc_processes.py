"""A group and other parts of its process: a forked child, an earlier group, autograd, signals, torch's own switches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ipc_harness import Job, on_ranks

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)


def summed(**how: Any) -> float:
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, **how)
    if work is not None:
        work.wait()
    return tensor.item()


def in_child(function: Callable[[], Any]) -> str:
    """Return the class of the error of a function in a forked child, or its result as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(function())
        except BaseException as error:
            text = type(error).__name__
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@on_ranks(2)
def test_a_forked_child_cannot_use_its_parents_group(job: Job) -> None:
    """The child gets an error, and neither its call nor the end of its copy reaches the parent's group."""
    job.init()
    summed(async_op=True)
    refused = [summed, lambda: summed(async_op=True), dist.barrier]
    # The last call is on the prepared path.
    for use in (*refused, summed, lambda: dist.group.WORLD.abort(), dist.destroy_process_group):  # type: ignore[union-attr]
        assert in_child(use) == ("GroupClosedError" if use in refused else "None")
        assert summed() == 2.0


@on_ranks(2)
def test_a_forked_child_cannot_wait_for_its_parents_call(job: Job) -> None:
    """A time limit makes no difference, and the call goes on."""
    job.init()
    dist.barrier()
    tensor = torch.ones(1)
    if job.rank == 1:
        time.sleep(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    if job.rank == 0:
        assert in_child(lambda: work.wait()) == "GroupClosedError"
        assert in_child(lambda: work.wait(timedelta(seconds=0.2))) == "GroupClosedError"
    work.wait()
    assert tensor.item() == 2.0


# Each must end by itself, and not by SIGABRT.
SCRIPTS = {
    "fork": """
import os, sys
import torch, torch.distributed as dist
import ray_fracbackend.ipc
dist.init_process_group("ipc", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1), async_op=True).wait()
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "calls": """
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
""",
    "failure": """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
import ray_fracbackend.ipc
rank, limit = int(sys.argv[1]), timedelta(seconds=20)
dist.init_process_group("ipc", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3, timeout=limit)
dist.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(4), async_op=True, group=dist.new_group(ranks=[0, 1])).wait()
dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=3))
queued = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
dist.barrier()
""",
    "watch": """
import contextlib, os, threading, types, torch
import ray_fracbackend.ipc.device.watch as watch
from ray_fracbackend.ipc.host.liveness import Peer, start_time
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
watch._MIN_LOOK_S = 0.001
watch.DeviceWatch([engine], stream, ["rank 0"], lambda: None)
begun.wait(60)
begun.clear()
begun.wait(60)
""",
}
full = pytest.mark.full


@pytest.mark.parametrize(
    ("script", "last", "codes"),
    [
        pytest.param("fork", "", [0], marks=full),
        ("calls", "together", [0, 0]),
        pytest.param("calls", "alone", [0, 0], marks=full),
        # Rank 2 is stopped; the others have an error, a group that was not shut down, and calls in its queue.
        pytest.param("failure", "", [1, 1, -signal.SIGKILL], marks=full),
        *[pytest.param("watch", "", [0], marks=full)] * 3,
    ],
)
def test_a_process_ends(script: str, last: str, codes: list[int], tmp_path: Path) -> None:
    """In the middle of a call, after a failure, and with threads in torch's C++ or without them."""
    command = [sys.executable, "-c", SCRIPTS[script]]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store"), last]) for rank in range(len(codes))]
    try:
        for rank in ranks[:2]:
            rank.wait(100)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.wait(10) for rank in ranks] == codes


@on_ranks(2)
def test_a_store_can_be_used_again(job: Job) -> None:
    """Groups one after the other with one store, as with torchrun: none reads the data of an ended one."""
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    for _ in range(3):
        dist.init_process_group("ipc", store=store, rank=job.rank, world_size=job.size)
        assert summed() == 2.0
        dist.destroy_process_group()


@on_ranks(2)
def test_versions_of_tensors_stay(job: Job) -> None:
    """As with Gloo and NCCL, a write to a detached tensor is not an error in the next backward pass."""
    job.init()
    for step in (1, 2):  # dense, and not
        weight = torch.ones(3, requires_grad=True)
        product = weight * weight
        dist.broadcast(weight.detach()[::step], 0)
        product.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 3
    for call in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.all_gather([t, torch.empty_like(t)], t.clone()),
        lambda t: dist.all_to_all_single(t, torch.ones(2)),
    ):
        p = torch.sigmoid(torch.zeros(2, requires_grad=True))
        before = p._version
        call(p.detach())
        assert p._version == before


@on_ranks(2)
def test_denormal_numbers_are_flushed_as_in_the_callers_thread(job: Job) -> None:
    """Whichever thread runs the call: rank 1's worker, which started before, and rank 0's caller."""
    job.init()
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # type: ignore[union-attr]
    torch.set_flush_denormal(True)
    tensor = torch.ones(8, dtype=torch.int32).view(torch.float32)
    work = dist.all_reduce(tensor, async_op=True)
    if job.rank == 1:
        time.sleep(0.5)
    work.wait()  # type: ignore[union-attr]
    assert tensor.view(torch.int32).tolist() == [0] * 8


@on_ranks(2)
def test_the_limit_of_an_asynchronous_call_begins_with_it(job: Job) -> None:
    """And not when a thread begins to run it, after the calls before it."""
    job.init()
    group, limits = dist.group.WORLD, []
    if job.rank == 0:
        reduce = group._host.reduce  # type: ignore[union-attr]
        group._host.reduce = lambda *args: (limits.append(args[-1].deadline), reduce(*args))  # type: ignore[union-attr]
    else:
        time.sleep(0.5)
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    latest = time.monotonic() + job.timeout_s
    for work in works:
        work.wait()  # type: ignore[union-attr]
    assert all(limit <= latest for limit in limits)
    assert len(limits) == 2 * (job.rank == 0)


@on_ranks(2)
def test_a_handler_that_exits_ends_a_wait(job: Job) -> None:
    """``wait()`` raises SystemExit, whichever call was in progress."""
    job.init()
    summed(async_op=True)
    if job.rank == 1:
        time.sleep(3.0)
        return
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(7))
    dist.all_reduce(torch.ones(1), async_op=True)
    second = dist.all_reduce(torch.ones(1), async_op=True)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(SystemExit, match="7"):
        second.wait()


@on_ranks(2)
def test_the_limit_of_torchs_own_function_counts(job: Job) -> None:
    """``_set_pg_timeout`` sets the limit; the message has torch's wording, for those who look for it."""
    job.init()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    if job.rank == 1:
        time.sleep(2.0)
        return
    started = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=r"timed out.* timeout "):
        summed()
    assert time.monotonic() - started < 2


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
@on_ranks(2)
def test_a_torch_without_cuda_has_no_group_for_cuda(job: Job) -> None:
    """Otherwise torch uses CUDA as the device of the group's objects."""
    job.init()
    assert [device.type for device in dist.group.WORLD._device_types] == ["cpu"]  # type: ignore[union-attr]
