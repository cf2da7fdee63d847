"""The device transport with a fake device whose streams run late: set-up and its failures. test_staged.py tests results and faults."""

from __future__ import annotations

import logging
import os
import re
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import fake_cuda
import pytest
import torch
from ipc_calls import DEVICE_CALLS, DEVICE_NUMEL, bare_group, error_of, filled, options, strike
from ipc_harness import Job, on_ranks, run_ranks, values
from ipc_memories import LOST, comes_free, device_group
from ipc_table import SMALL_CHUNKS

from ray_fracbackend.ipc.device import driver, side, watch
from ray_fracbackend.ipc.device.runtime import DeviceCall
from ray_fracbackend.ipc.device.watch import DeviceWatch
from tests.processes import wait_until

FAKE = {**SMALL_CHUNKS, "FAKE_CUDA_SEED": "1"}
PATH = "RAY_FRACBACKEND_IPC_DEVICE_PATH"
# Callers also have a stream, so nothing blocks on a device whose peer is dead.
ASYNC = {**FAKE, "FAKE_CUDA_ASYNC": "1"}


def carried_by(job: Job, count: int = 1) -> list[Any]:
    """Return what carries the tensors of `count` groups that are created, used and dropped, and what happened to the memory."""
    logging.disable(logging.CRITICAL)
    reports = []
    for number in range(count):
        pg = bare_group(job, str(number), job.rank, job.size, 20.0)
        tensors = [filled(DEVICE_NUMEL) for _ in range(3)]
        works = [pg.allreduce([tensor], options("Allreduce", asyncOp=True)) for tensor in tensors]
        for work in works:
            work.wait()
        assert all(bool((tensor == job.size).all()) for tensor in tensors)
        lane = pg._device_side._lane
        reports.append((pg.staged_reason, lane.memory.chunk_bytes if lane else 0))
        pg.barrier(options("Barrier"))
        pg.shutdown()
        assert not lane or not fake_cuda.registered
    return [reports, fake_cuda.released]


@pytest.mark.parametrize(
    ("size", "variables", "reason"),
    [
        # There is no other rank to share it with.
        (1, {}, None),
        (3, {"FAKE_CUDA_UUID": "aab"}, "the ranks are on 2 devices"),
        (2, {PATH: ["auto", "staged"]}, f"rank 1: {PATH}=staged is set"),
    ],
)
def test_tensors_that_are_staged(size: int, variables: dict[str, Any], reason: str | None) -> None:
    """Every rank has the same reason after the first call, the results are right, and nothing was allocated."""
    env = lambda rank: {**FAKE, **{name: of_rank[rank] for name, of_rank in variables.items()}}  # noqa: E731
    assert values(run_ranks(carried_by, size, env=env)) == [[[(reason, 0)], []]] * size


# What one rank cannot do, the rank, and the reason that all ranks report.
BROKEN = {
    "missing": (1, "rank 1: the fake device is missing"),
    "open": (1, "rank 1: the fake driver refuses"),
    "export": (0, "rank 0: cuIpcGetMemHandle: CUDA_ERROR_OUT_OF_MEMORY"),
    "memory": (1, "rank 0: device memory that was mapped from another process holds wrong data"),
    "register": (1, "rank 1: cuMemHostRegister_v2: CUDA_ERROR_NOT_SUPPORTED"),
    # Rank 0 waits for rank 1, whose stream does not see the awaited word.
    "word": (1, "rank 0: the device did not finish within 4 s"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_one_rank_that_cannot_use_device_memory_has_all_staged(broken: str) -> None:
    """Every rank has the same reason, and the results of the collectives are still correct."""
    where, reason = BROKEN[broken]
    fake = {**FAKE, "FAKE_CUDA_STEP_S": "8" if broken == "word" else "20"}
    env = lambda rank: {**fake, "FAKE_CUDA_BROKEN": broken} if rank == where else fake  # noqa: E731
    for rank, (reports, released) in enumerate(values(run_ranks(carried_by, 3, env=env))):
        assert reports == [(reason, 0)]
        # The first rank frees its memory, unless a device that still uses it may be stuck.
        assert (False in released) == (rank == 0 and broken not in ("missing", "word"))


@pytest.mark.parametrize(("env", "text"), [({"FAKE_CUDA_BROKEN": "missing"}, "the fake device is missing"), ({}, "")])
def test_where_only_device_memory_will_do_its_lack_is_an_error(env: dict[str, str], text: str) -> None:
    """Otherwise a benchmark or a test could measure another path without noticing."""
    for _, found, _ in values(run_ranks(first_call, 2, env={**FAKE, PATH: "memory", **env})):
        assert text in found
        assert bool(text) == bool(found)


def first_call(job: Job) -> tuple[str, str, float]:
    """Return the error of the call that sets up device memory."""
    pg = bare_group(job, "first", job.rank, job.size, 20.0)
    return error_of(lambda: DEVICE_CALLS["all_reduce"](pg))


@pytest.mark.parametrize("number", [0, 1])
@on_ranks(2, env={**FAKE, "FAKE_CUDA_BROKEN": "missing"})
def test_an_operation_that_gloo_lacks_does_not_break_the_group(job: Job, number: int) -> None:
    """Also if that call shows that device memory is not available."""
    logging.disable(logging.CRITICAL)
    pg = bare_group(job, "refused", job.rank, job.size, 20.0)
    tensors = [torch.ones(4) for _ in range(4)]
    tensors[number] = torch.quantize_per_tensor(tensors[number], 0.1, 0, torch.qint8)
    found = [error_of(lambda t=t: pg.allreduce([t], options("Allreduce")).wait())[0] for t in tensors]
    assert found == ["IpcError" if index == number else "" for index in range(4)]


@pytest.mark.parametrize("letter", ["e", "\u00e9", "\n", "\U0001f600"])
@on_ranks(2, env=FAKE)
def test_a_long_reason_is_shortened(job: Job, letter: str) -> None:
    """Whatever its characters need as JSON."""
    logging.disable(logging.CRITICAL)
    if job.rank == 1:
        fake_cuda.FakeCuda.missing = lambda self: letter * 5000
    pg = bare_group(job, "long", job.rank, job.size, 20.0)
    pg.allreduce([torch.ones(4)], options("Allreduce")).wait()
    assert pg.staged_reason == "rank 1: " + letter * (len(pg.staged_reason) - 8)
    assert len(pg.staged_reason) > 300


def never() -> fake_cuda.FakeEvent:
    """Return an event that the device does not reach until its second word is 1."""
    return fake_cuda.FakeEvent(fake_cuda.FakeCuda.gpu, [1, 0])


@on_ranks(2, env=FAKE)
def test_memory_that_a_peer_left_mapped_is_not_freed(job: Job) -> None:
    """Rank 1 leaves before its device has finished: rank 0 keeps its block, which rank 1 may still use."""
    logging.disable(logging.CRITICAL)
    pg = device_group(job, "left", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    store = job.store()
    if job.rank == 1:
        side._SHUTDOWN_S = 0.1
        next(iter(pg._device_side._streams.values())).stream.wait_event(never())
        pg.shutdown()
        store.set("left", "")
    store.wait(["left"])
    if job.rank == 0:
        # Its own part is done, but it must not free memory that the other rank has mapped.
        pg.shutdown()
        store.set("seen", "")
    # The end of its process would release what it has mapped.
    store.wait(["seen"])
    assert fake_cuda.released == []


@on_ranks(2, env=FAKE)
def test_the_owner_of_the_memory_leaves_last(job: Job) -> None:
    """CUDA does not define what a rank sees in memory whose owner has freed it or has ended."""
    pg = device_group(job, "owner", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    waiter = pg._device_side._lane.engine.waiter
    if job.rank == 1:
        time.sleep(1.0)
    pg.shutdown()
    assert waiter.have_all_let_go() or job.rank == 1


@on_ranks(2, env=FAKE)
def test_the_set_up_does_not_use_up_the_time_of_a_call(job: Job) -> None:
    """It takes longer than the group's timeout, and then rank 1 is late, but not too late."""
    real = side.DeviceSetup.run

    def slowly(*args: Any) -> Any:
        lane = real(*args)
        time.sleep(2.5 + 0.5 * job.rank)
        return lane

    side.DeviceSetup.run = slowly  # type: ignore[method-assign]
    pg = bare_group(job, "slow", job.rank, job.size, 2.0)
    tensor = filled(DEVICE_NUMEL)
    pg.allreduce([tensor], options("Allreduce")).wait()
    assert bool((tensor == job.size).all())


@on_ranks(2, env=FAKE)
def test_a_group_is_shut_down_with_a_call_on_the_device(job: Job) -> None:
    """Its memory is freed after that call."""
    pg, release, is_over = device_group(job, "busy", job.rank, job.size, 20.0), fake_cuda.FakeCuda.release, []
    pg.barrier(options("Barrier"))
    (stream,) = pg._device_side._streams.values()

    def noted(*args: Any) -> None:
        is_over.append(stream.last.query())
        release(*args)

    fake_cuda.FakeCuda.release = noted
    fake_cuda.FakeCuda.gpu.running.clear()
    pg.allreduce([filled(DEVICE_NUMEL)], options("Allreduce", asyncOp=True))
    threading.Timer(0.5, fake_cuda.FakeCuda.gpu.running.set).start()
    pg.shutdown()
    assert is_over == [True]


def with_a_host_inside_a_launch(job: Job) -> None:
    """Rank 0's host is blocked while it issues a call, as CUDA may do in a launch; rank 1 dies."""
    pg = device_group(job, "launch", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    all_reduce = lambda: pg.allreduce([filled(DEVICE_NUMEL)], options("Allreduce")).wait()  # noqa: E731
    all_reduce()
    watch.PATIENCE_S = 1.0
    if job.rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    pg._device_side._lane.memory.announce = lambda progress: time.sleep(600)
    all_reduce()


def test_a_survivor_whose_host_is_inside_a_launch_ends() -> None:
    """No call of it raises an error, and its device waits for the dead rank."""
    survivor, _ = run_ranks(with_a_host_inside_a_launch, 2, limit_s=60, env=ASYNC)
    assert survivor.exitcode == -signal.SIGABRT


@on_ranks(2, env=FAKE)
def test_every_tensor_of_an_asynchronous_call_is_kept(job: Job) -> None:
    """The caller may free inputs and outputs at once, and the allocator must know that the group's stream uses them."""
    kept: list[int] = []
    fake_cuda.FakeCuda.keep = lambda self, tensor, stream: kept.append(tensor.data_ptr())
    pg = device_group(job, "kept", job.rank, job.size, 20.0)
    own, outputs = filled(DEVICE_NUMEL), [torch.empty(DEVICE_NUMEL) for _ in range(job.size)]
    pg.allgather([outputs], [own], options("Allgather", asyncOp=True)).wait()
    assert sorted(kept) == sorted(tensor.data_ptr() for tensor in (own, *outputs))


def with_a_device_that_is_late(job: Job, calls: bool, errors: Path) -> str:
    """Rank 0's device does not finish a call; rank 0 waits for it, or makes another call, like rank 1."""
    pg = device_group(job, "late", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    (stream,) = pg._device_side._streams.values()
    if job.rank == 0:
        os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
        stream.last, stream.timeout_s = never(), 0.5
        assert wait_until(lambda: pg._device_side._watch._seen is not None, 10)
        time.sleep(0 if calls else 60)
    end, text = time.monotonic() + 30, ""
    while not text and time.monotonic() < end:
        text = error_of(lambda: pg.barrier(options("Barrier")))[1]
    return text


@pytest.mark.parametrize("calls", [pytest.param(False, marks=pytest.mark.full), True], ids=["waits", "calls"])
def test_a_device_that_is_late(tmp_path: Path, calls: bool) -> None:
    """Only the group's timeout ends a wait for a device: the others and the process get an error, or the process ends."""
    errors = tmp_path / "errors"
    first, second = run_ranks(with_a_device_that_is_late, 2, calls, errors, limit_s=60, env=FAKE)
    text = r"the group's timeout of 0\.5 s \(rank 1 \(pid \d+\) is running\)\."
    assert re.search(text, str(second.value))
    if calls:
        assert re.search(text, str(first.value))
    else:
        assert first.exitcode == -signal.SIGABRT
        assert re.search(text + " A collective is on .* Ending this process", errors.read_text())


@pytest.mark.full
@on_ranks(2, env=FAKE)
def test_a_process_that_was_stopped_itself_is_not_late(job: Job) -> None:
    """Rank 0 is stopped while a call is on its device, which finishes soon after: it has not waited for its device meanwhile."""
    pg = device_group(job, "stopped", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    store = job.store()
    if job.rank == 0:
        (stream,) = pg._device_side._streams.values()
        stream.last, stream.timeout_s = never(), 4.0
        assert wait_until(lambda: pg._device_side._watch._seen is stream.last, 5)
        store.set("pid", str(os.getpid()))
        store.wait(["went on"])
        stream.last.words[1] = 1
    else:
        store.wait(["pid"])
        os.kill(int(store.get("pid")), signal.SIGSTOP)
        time.sleep(6)
        os.kill(int(store.get("pid")), signal.SIGCONT)
        store.set("went on", "")
    pg.barrier(options("Barrier"))


@on_ranks(2, env=ASYNC, needed=1)
def test_the_end_of_a_wait_that_is_overwritten(job: Job) -> None:
    """As by a rank that was stopped, continues and is killed: its stream wrote an older step, and never the awaited one.

    Neither device works until rank 1 has died, and an older step of rank 1 overwrites each end of rank 0's waits.
    """
    pg = device_group(job, "overwritten", job.rank, job.size, 20.0)
    device, gpu = pg._device_side, fake_cuda.FakeCuda.gpu
    timeline = device._lane.memory.timeline
    gpu.running.clear()
    pg.allreduce([torch.ones(4)], options("Allreduce"))
    if job.rank == 1:
        strike("kill")

    def older_step() -> None:
        timeline._words[timeline._awaited[1] // 8] = 0

    for engine in (device._lane.engine, device._host.engine):
        engine.on_raise.append(older_step)
    assert error_of(lambda: pg.barrier(options("Barrier")))[0] in LOST
    time.sleep(2)  # the watch has ended them once
    older_step()
    gpu.running.set()
    assert comes_free(pg)
    pg.shutdown()


@pytest.mark.parametrize("how", ["died", "aborted"])
@on_ranks(2, env=ASYNC, needed=1)
def test_a_group_ends_with_a_call_on_the_device(job: Job, how: str) -> None:
    """The device waits for a rank that died or is late, and no call reports it: the group still lets go of its memory."""
    pg, running = device_group(job, how, job.rank, job.size, 20.0), fake_cuda.FakeCuda.gpu.running
    running.clear()
    pg.allreduce([torch.ones(4)], options("Allreduce"))
    if job.rank == 1:
        strike("kill") if how == "died" else time.sleep(60)
    running.set()
    if how == "died":
        assert wait_until(pg._device_side._lane.engine.waiter.is_poisoned, 10)
    else:
        pg.abort()
        assert comes_free(pg)
    pg.shutdown()
    assert not fake_cuda.registered


def test_a_call_that_fails_keeps_its_tensors_until_the_device_is_through() -> None:
    """Copies that were issued before the failure still use them, and no stream of the caller waits for those."""
    kept: list[tuple[Any, Any]] = []
    stream, tensor, error = MagicMock(), torch.ones(1), ValueError("in the middle")
    stream.runtime.is_capturing.return_value = False
    stream.runtime.keep = lambda *args: kept.append(args)
    failing = DeviceCall(stream, lambda: None, MagicMock(side_effect=error), [tensor], is_async=False, timeout_s=20.0)
    with pytest.raises(ValueError, match="in the middle"):
        failing()
    assert stream.last is not failing  # else the watch would wait for it, and end the process
    assert [(id(one), on) for one, on in kept] == [(id(tensor), stream.stream)]
    DeviceCall(stream, lambda: None, lambda: None, [tensor], is_async=False, timeout_s=20.0)()
    assert (len(kept), stream.timeout_s) == (1, 20.0)


def test_words_are_written_in_batches_that_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than 256 operations in a call, each laid out as CUstreamBatchMemOpParams of cuda.h: operation, address, value, flags."""
    calls: list[Any] = []
    monkeypatch.setattr(driver, "call_on", lambda *args: calls.append(args))
    runtime = driver.CudaRuntime(torch.device("cuda", 0))
    runtime.write_words(MagicMock(cuda_stream=7), {8 * number: number for number in range(300)})
    assert [(name, count, len(bytes(array)), flags) for _, name, _, count, array, flags in calls] == [
        ("cuStreamBatchMemOp_v2", count, count * 48, 0) for count in (255, 45)
    ]
    assert struct.unpack_from("=I4xQQI20x", bytes(calls[1][4]), 48) == (5, 8 * 256, 256, 0)


def test_on_a_full_device_all_tensors_are_staged() -> None:
    """The reason has the size and the variable that sets it."""
    big = {**FAKE, "RAY_FRACBACKEND_IPC_DEVICE_CHUNK_BYTES": str(1 << 20)}
    env = lambda rank: {**big, "FAKE_CUDA_FREE": str(6 << 18)} if rank == 0 else big  # noqa: E731
    for reports, _ in values(run_ranks(carried_by, 2, env=env)):
        ((reason, _),) = reports
        assert reason.startswith("rank 0: the fake device is full (6 MiB for 2 ranks with chunks of 1048576 bytes; ")
        assert "RAY_FRACBACKEND_IPC_DEVICE_CHUNK_BYTES" in reason
    trimmed = values(run_ranks(carried_by, 2, env={**big, "FAKE_CUDA_FREE": str(3 << 20)}))
    assert [reports for reports, _ in trimmed] == [[(None, 1 << 20)]] * 2


def test_groups_that_come_and_go_free_their_memory() -> None:
    """A block is freed when no rank has it mapped any more. Ranks that are given different sizes agree on them."""
    name, sizes = "RAY_FRACBACKEND_IPC_DEVICE_{}_BYTES".format, {"CHUNK": 65536, "ONE_PASS": 16384}
    env = lambda rank: {**FAKE, **{name(of): str(size << 8 * rank) for of, size in sizes.items()}}  # noqa: E731
    for rank, (reports, released) in enumerate(values(run_ranks(carried_by, 3, 4, env=env))):
        assert reports == [(None, 65536)] * 4
        assert released == [rank != 0] * 4


def test_a_rank_that_dies_during_set_up_is_reported() -> None:
    """The survivors do not wait for the rest of the set-up."""
    env = lambda rank: {**ASYNC, "FAKE_CUDA_BROKEN": "die"} if rank == 2 else ASYNC  # noqa: E731
    for error_type, text, _ in values(run_ranks(first_call, 3, env=env, needed=2)[:2]):
        assert error_type in LOST, text


@pytest.mark.parametrize("has_reason", [False, True])
def test_the_watch_does_not_hide_the_reason_of_a_rank_that_ends(has_reason: bool) -> None:
    """A rank that failed in a call on the host, and ended, has not merely died for a peer that waits on the device."""
    engines, watch = [MagicMock(), MagicMock()], DeviceWatch.__new__(DeviceWatch)
    for engine, is_poisoned in zip(engines, (False, has_reason), strict=True):
        engine.waiter.is_poisoned.return_value = is_poisoned
    watch._engines, watch._stream, watch._closed = engines, MagicMock(last=None), threading.Event()
    watch._report("rank 1 died")
    assert [engine.fail.called for engine in engines] == [not has_reason] * 2
    engines[0].waiter.peers = [MagicMock(**{"is_alive.return_value": False})]
    watch._closed.set()
    assert watch._wait_for_fault() is None  # that rank had left the group
    watch._run()
    watch._stream.runtime.on.assert_called_once_with(watch._stream.stream)


@pytest.mark.parametrize("group", [bare_group, device_group], ids=["before set-up", "after set-up"])
@on_ranks(2, env=ASYNC)
def test_calls_on_host_and_device_that_meet_are_named_with_both_sides(job: Job, group: Any) -> None:
    """The two kinds of memory count their steps separately, but a rank that used the other one is detected."""
    pg = group(job, "other", job.rank, job.size, 10.0)
    call = DEVICE_CALLS["all_reduce" if job.rank == 0 else "barrier"]
    error_type, text, _ = error_of(lambda: (call(pg), pg.barrier(options("Barrier"))))
    assert error_type in ("CollectiveMismatchError", "GroupPoisonedError"), text
    assert "all_reduce(float32[66000], SUM)" in text
    assert "barrier" in text, text
