"""The device transport with a fake device whose streams run late: exact results, users of torch's groups, set-up and its failures."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from ipc_calls import bare_group, options
from ipc_device_calls import CALLS, comes_free, device_group, filled, phases
from ipc_device_faults import check_signal, error_of, struck_by_exception
from ipc_fault_runs import strike
from ipc_harness import Job, run_ranks, typed, values
from ipc_random_faults import check_random
from ipc_table import SMALL_CHUNKS, whole_table
from ipc_workloads import busy
from test_ipc_torch import ddp_cases, meshes_and_objects, odd_uses

from ray_fracbackend.ipc.device import memory
from ray_fracbackend.ipc.device.runtime import DeviceCall
from ray_fracbackend.ipc.protocol.local import LEADER
from tests.processes import wait_until

FAKE = {**SMALL_CHUNKS, "FAKE_CUDA_SEED": "1"}
PATH = "RAY_FRACBACKEND_IPC_DEVICE_PATH"
# A separate device type, on the second of two devices: torch refuses to mix its tensors with those of the host.
TYPED = {**SMALL_CHUNKS, "IPC_TEST_DEVICE": "fake:1"}
# Callers also have a stream, so nothing blocks on a device whose peer is dead.
ASYNC = {**FAKE, "FAKE_CUDA_ASYNC": "1"}
DTYPES = [torch.float32, torch.bfloat16, torch.uint16, torch.bool]


@pytest.mark.full
@pytest.mark.parametrize(("size", "how"), [*((size, "leader") for size in (1, 2, 4)), (3, "split")])
def test_every_collective_matches_the_reference(size: int, how: str, full: bool) -> None:
    """The table of the host's tests, on late streams, with each way to reduce."""
    env = {**FAKE, "RAY_FRACBACKEND_IPC_DEVICE_REDUCE": how}
    for failures in values(run_ranks(whole_table, size, DTYPES, full, limit_s=200, env=env)):
        assert failures == []


@typed
@pytest.mark.full
@pytest.mark.parametrize(("size", "how"), [(3, "split"), *((size, "leader") for size in (1, 2, 4))])
def test_every_collective_on_a_device_of_its_own_type(size: int, how: str, full: bool) -> None:
    """As above; sums of another type also stay on the device."""
    env = {**TYPED, "RAY_FRACBACKEND_IPC_DEVICE_REDUCE": how}
    for failures in values(run_ranks(whole_table, size, DTYPES, full, limit_s=200, env=env)):
        assert failures == []


def contexts_of(job: Job) -> set[int]:
    """Return devices that a process has used after calls of each kind."""
    import fake_accelerator

    pg = device_group(job, "contexts", job.rank, job.size, 20.0)
    for number, call in enumerate(CALLS.values()):
        call(pg)
        works = [pg.allreduce([filled()], options("Allreduce", asyncOp=True)) for _ in range(number % 3)]
        for work in works:
            work.wait()
    pg.shutdown()
    return fake_accelerator.FakeModule.contexts


@typed
def test_no_rank_makes_a_context_on_another_device() -> None:
    """A group's threads start on the first device, which may be another rank's: a context uses hundreds of megabytes of it."""
    assert values(run_ranks(contexts_of, 2, limit_s=60, env=TYPED)) == [{1}, {1}]


def dropped(job: Job, keeps: bool) -> int:
    """Return wrong sums of asynchronous calls whose tensors all callers except rank 0 have freed when the device starts."""
    import fake_accelerator

    from ray_fracbackend.ipc.device import runtime

    if not keeps:
        runtime.CudaRuntime.keep = lambda *args: None  # type: ignore[method-assign]
    pg = device_group(job, "dropped", job.rank, job.size, 20.0)
    wrong = 0
    for _ in range(30):
        fake_accelerator.FakeModule.gpu.running.clear()
        tensor = filled(1000)
        pg.allreduce([tensor] if job.rank == 0 else [filled(1000)], options("Allreduce", asyncOp=True))
        pg.barrier(options("Barrier"))
        fake_accelerator.FakeModule.gpu.running.set()
        torch.get_device_module("fake").synchronize()
        wrong += job.rank == 0 and not bool((tensor.cpu() == job.size).all())
    return wrong


@typed
def test_memory_of_a_call_is_not_reused_before_the_device_is_through() -> None:
    """Even if its tensors are no longer referenced; without recording the stream the sums are wrong."""
    assert values(run_ranks(dropped, 2, True, limit_s=60, env=TYPED)) == [0, 0]
    assert values(run_ranks(dropped, 2, False, limit_s=60, env=TYPED))[0] > 0


def test_ddp_and_its_hooks_end_with_the_same_weights_as_gloo() -> None:
    """Buckets use futures that complete only after the device has reached them."""
    for different in values(run_ranks(ddp_cases, 2, limit_s=120, env=FAKE)):
        assert different == []


def test_meshes_objects_and_odd_tensors() -> None:
    """Sub-groups have their own device memory, and tensors that are not dense use Gloo, after the stream."""
    for result in values(run_ranks(meshes_and_objects, 4, limit_s=120, env=FAKE)):
        assert result["coalesced"] == [[6.0] * 2, [6.0] * 3]
        assert result["objects"] == [0, 1, 2, 3]
    for bad in values(run_ranks(odd_uses, 2, limit_s=120, env=FAKE)):
        assert bad == []


def carried_by(job: Job, count: int = 1) -> list[Any]:
    """Return what carries the tensors of `count` groups that are created, used and dropped, and what happened to the memory."""
    import fake_cuda

    logging.disable(logging.CRITICAL)
    reports = []
    for number in range(count):
        pg = bare_group(job, str(number), job.rank, job.size, 20.0)
        tensors = [filled() for _ in range(3)]
        works = [pg.allreduce([tensor], options("Allreduce", asyncOp=True)) for tensor in tensors]
        for work in works:
            work.wait()
        right = all(bool((tensor == job.size).all()) for tensor in tensors)
        lane = pg._device_side._lane
        reports.append((pg.staged_reason, right, lane.memory.chunk_bytes if lane else 0))
        pg.barrier(options("Barrier"))
        pg.shutdown()
        assert not lane or not fake_cuda.registered
    return [reports, fake_cuda.released]


def test_ranks_on_several_hosts_are_staged() -> None:
    """Device memory cannot be shared between hosts; the first call with a device tensor reports this like any other reason."""
    env = lambda rank: {**FAKE, "RAY_FRACBACKEND_IPC_HOST": "aab"[rank]}  # noqa: E731
    for reports, released in values(run_ranks(carried_by, 3, limit_s=120, env=env)):
        assert (reports, released) == ([("the ranks are on several hosts", True, 0)], [])


def test_ranks_on_several_devices_are_staged() -> None:
    """Device memory is used only if all ranks of the group are on one device."""
    env = lambda rank: {**FAKE, "FAKE_CUDA_UUID": "aab"[rank]}  # noqa: E731
    for reports, released in values(run_ranks(carried_by, 3, limit_s=120, env=env)):
        assert (reports, released) == ([("the ranks are on 2 devices", True, 0)], [])


def test_a_group_of_one_rank_uses_no_device_memory() -> None:
    """There is no other rank to share it with."""
    assert values(run_ranks(carried_by, 1, limit_s=60, env=FAKE)) == [[[(None, True, 0)], []]]


def test_staging_can_be_requested() -> None:
    """One rank can request it for all, and the report states this."""
    env = lambda rank: {**FAKE, PATH: "staged"} if rank == 1 else FAKE  # noqa: E731
    for reports, released in values(run_ranks(carried_by, 2, limit_s=60, env=env)):
        assert (reports, released) == ([(f"rank 1: {PATH}=staged is set", True, 0)], [])


def error_of_first_call(job: Job) -> str:
    """Return the error of a group's first call with device tensors."""
    pg = bare_group(job, "memory", job.rank, job.size, 20.0)
    return error_of(lambda: CALLS["all_reduce"](pg))[1]


def test_where_only_device_memory_will_do_its_lack_is_an_error() -> None:
    """Otherwise a benchmark or a test could measure another path without noticing."""
    env = {**FAKE, PATH: "memory", "FAKE_CUDA_BROKEN": "missing"}
    for text in values(run_ranks(error_of_first_call, 2, limit_s=60, env=env)):
        assert "the fake device is missing" in text
    hosts = lambda rank: {**FAKE, PATH: "memory", "RAY_FRACBACKEND_IPC_HOST": str(rank)}  # noqa: E731
    for text in values(run_ranks(error_of_first_call, 2, limit_s=60, env=hosts)):
        assert "the ranks are on several hosts" in text
    assert values(run_ranks(error_of_first_call, 2, limit_s=60, env={**FAKE, PATH: "memory"})) == ["", ""]


REASONS = {
    "missing": "rank 1: the fake device is missing",
    "open": "rank 1: the fake driver refuses",
    "export": "rank 0: cuIpcGetMemHandle: CUDA_ERROR_OUT_OF_MEMORY",
    "memory": "rank 0: device memory that was mapped from another process holds wrong data",
    "register": "rank 1: cuMemHostRegister_v2: CUDA_ERROR_NOT_SUPPORTED",
    # Rank 0 waits for rank 1, whose stream does not see the awaited word.
    "word": "rank 0: the device did not finish within 4 s",
}


@pytest.mark.parametrize("broken", REASONS)
def test_one_rank_that_cannot_use_device_memory_has_all_staged(broken: str) -> None:
    """Every rank has the same reason, and the results of the collectives are still correct."""
    fake = {**FAKE, "FAKE_CUDA_STEP_S": "8" if broken == "word" else "20"}
    where = 0 if broken == "export" else 1
    env = lambda rank: {**fake, "FAKE_CUDA_BROKEN": broken} if rank == where else fake  # noqa: E731
    for rank, (reports, released) in enumerate(values(run_ranks(carried_by, 3, limit_s=120, env=env))):
        assert [report[:2] for report in reports] == [(REASONS[broken], True)]
        # The first rank frees its memory. After something was issued to a device that may be stuck, nothing is freed any more.
        assert (False in released) == (rank == 0 and broken not in ("missing", "memory", "word"))


def refused_by_gloo(job: Job, number: int) -> list[tuple[str, str]]:
    """Run a few calls, one of which uses Gloo, which does not support it; return their errors."""
    logging.disable(logging.CRITICAL)
    pg = bare_group(job, "refused", job.rank, job.size, 20.0)
    tensors = [torch.ones(4) for _ in range(4)]
    tensors[number] = torch.quantize_per_tensor(tensors[number], 0.1, 0, torch.qint8)
    return [error_of(lambda t=t: pg.allreduce([t], options("Allreduce")).wait())[0] for t in tensors]


@pytest.mark.parametrize("number", [0, 1])
def test_an_operation_that_gloo_lacks_does_not_break_the_group(number: int) -> None:
    """Also if that call shows that device memory is not available."""
    env = {**FAKE, "FAKE_CUDA_BROKEN": "missing"}
    expected = [""] * 4
    expected[number] = "RuntimeError"
    assert values(run_ranks(refused_by_gloo, 2, number, limit_s=60, env=env)) == [expected] * 2


def with_a_long_reason(job: Job, text: str) -> str:
    """Return why Gloo carries the tensors of a group if a rank has a long reason."""
    import fake_cuda

    logging.disable(logging.CRITICAL)
    if job.rank == 1:
        fake_cuda.FakeCuda.missing = lambda self: text
    pg = bare_group(job, "long", job.rank, job.size, 20.0)
    pg.allreduce([torch.ones(4)], options("Allreduce")).wait()
    return str(pg.staged_reason)


@pytest.mark.parametrize("letter", ["e", "\u00e9", "\n", "\U0001f600"])
def test_a_long_reason_is_shortened(letter: str) -> None:
    """Whatever its characters need as JSON."""
    for reason in values(run_ranks(with_a_long_reason, 2, letter * 5000, limit_s=60, env=FAKE)):
        assert reason == "rank 1: " + letter * (len(reason) - 8)
        assert len(reason) > 300


def left_behind(job: Job) -> list[bool]:
    """Return what rank 0 has freed after rank 1 left before its device had finished."""
    import fake_cuda

    from ray_fracbackend.ipc.device import side

    logging.disable(logging.CRITICAL)
    pg = device_group(job, "left", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    if job.rank == 1:
        side._SHUTDOWN_S = 0.1
        event = fake_cuda.FakeEvent(fake_cuda.FakeCuda.gpu, [1, 0])  # never completes
        next(iter(pg._device_side._streams.values())).last = event
        pg.shutdown()
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    if job.rank == 1:
        store.set("left", "")
    store.wait(["left"])
    if job.rank == 0:
        # Its own part is done, but it must not free memory that the other rank has mapped.
        pg.shutdown()
        memory.free_retired()
        store.set("seen", "")
    # The end of its process would release what it has mapped.
    store.wait(["seen"])
    return fake_cuda.released


def test_memory_that_a_peer_left_mapped_is_not_freed() -> None:
    """Rank 0 keeps its block, which rank 1 may still use."""
    first, second = values(run_ranks(left_behind, 2, limit_s=60, env=FAKE))
    assert first == []
    assert second == []


def is_watched() -> bool:
    """Return whether the thread that watches for dead ranks runs."""
    return any(thread.name == "ipc device watch" for thread in threading.enumerate())


def watched_with_a_forked_child(job: Job) -> list[bool]:
    """Return whether the group is watched: before a fork, after the child has left its copy of the group, and after `shutdown` here."""
    pg = device_group(job, "fork", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    seen = [is_watched()]
    (left, has_left), (end, ends) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        pg.shutdown()
        pg.abort()
        os.close(ends)
        os.write(has_left, b"x")
        os.read(end, 1)  # until the parent has closed its side
        os._exit(0)
    os.read(left, 1)
    seen.append(not wait_until(lambda: not is_watched(), 0.5))
    pg.shutdown()
    seen.append(not wait_until(lambda: not is_watched(), 20))
    os.close(ends)
    os.waitpid(child, 0)
    return seen


def test_a_forked_child_does_not_change_the_watch() -> None:
    """It holds the parent's pipe, but neither ends the parent's watch nor keeps it from ending."""
    assert values(run_ranks(watched_with_a_forked_child, 2, limit_s=60, env=FAKE)) == [[True, True, False]] * 2


def with_a_device_that_is_late(job: Job, calls: bool, errors: Path) -> str:
    """Rank 0's device does not finish a call; rank 0 waits for it, or makes another call, like rank 1."""
    import fake_cuda

    pg = device_group(job, "late", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    (stream,) = pg._device_side._streams.values()
    if job.rank == 0:
        os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
        stream.last, stream.timeout_s = fake_cuda.FakeEvent(fake_cuda.FakeCuda.gpu, [1, 0]), 0.5
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
    text = r"the device did not complete a collective within the group's timeout of 0\.5 s \(rank 1 \(pid \d+\) is running\)\."
    assert re.search(text, str(second.value))
    if calls:
        assert re.search(text, str(first.value))
    else:
        assert first.exitcode == -signal.SIGABRT
        assert re.search(text + " A collective is on .* Ending this process", errors.read_text())


def stopped_for_longer_than_the_timeout(job: Job) -> str:
    """Rank 0 is stopped while a call is on its device, which finishes soon after; return the error of its next call, if any."""
    import fake_cuda

    pg = device_group(job, "stopped", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    if job.rank == 0:
        words = [1, 0]
        (stream,) = pg._device_side._streams.values()
        stream.last, stream.timeout_s = fake_cuda.FakeEvent(fake_cuda.FakeCuda.gpu, words), 4.0
        store.set("pid", str(os.getpid()))
        store.wait(["went on"])
        words[1] = 1
    else:
        store.wait(["pid"])
        os.kill(int(store.get("pid")), signal.SIGSTOP)
        time.sleep(6)
        os.kill(int(store.get("pid")), signal.SIGCONT)
        store.set("went on", "")
    return error_of(lambda: pg.barrier(options("Barrier")))[1]


@pytest.mark.full
def test_a_process_that_was_stopped_itself_is_not_late() -> None:
    """It has not waited for its device during that time."""
    assert values(run_ranks(stopped_for_longer_than_the_timeout, 2, limit_s=60, env=FAKE)) == ["", ""]


def leaves_after_a_death(job: Job) -> tuple[str, bool]:
    """Return the error of a call after rank 1 has died and the watch has ended, and whether the group is watched after `shutdown`."""
    pg = device_group(job, "death", job.rank, job.size, 20.0)
    pg.barrier(options("Barrier"))
    if job.rank == 1:
        strike("kill")
    assert wait_until(lambda: not is_watched(), 20)
    error = error_of(lambda: pg.barrier(options("Barrier")))[0]
    pg.shutdown()
    pg.shutdown()
    return error, is_watched()


def test_a_group_whose_watch_has_ended_is_shut_down() -> None:
    """The watch ends with the first death; the group is closed later, by the caller's reaction to the error."""
    outcomes = run_ranks(leaves_after_a_death, 2, limit_s=60, env=FAKE, needed=1)
    assert values(outcomes[:1]) == [("GroupPoisonedError", False)]


def overwritten(job: Job) -> tuple[str, bool]:
    """Return rank 0's error of a call after rank 1 has died, and whether its device becomes free.

    Neither device works until then, and an older step of rank 1 overwrites each end of rank 0's waits.
    """
    import fake_cuda

    pg = device_group(job, "overwritten", job.rank, job.size, 20.0)
    side, gpu = pg._device_side, fake_cuda.FakeCuda.gpu
    engines, timeline = (side._lane.collectives.engine, side._shared.engine), side._lane.memory._timeline
    gpu.running.clear()
    pg.allreduce([torch.ones(4)], options("Allreduce"))
    if job.rank == 1:
        strike("kill")

    def older_step() -> None:
        timeline._words[timeline._word(1, 0) // 8] = 0

    for engine in engines:
        engine.on_raise.append(older_step)
    error = error_of(lambda: pg.barrier(options("Barrier")))[0]
    gpu.running.set()
    is_free = comes_free(pg)
    pg.shutdown()
    return error, is_free


def test_the_end_of_a_wait_that_is_overwritten() -> None:
    """As by a rank that was stopped, continues and is killed: its stream wrote an older step, and never the awaited one."""
    (survivor,) = values(run_ranks(overwritten, 2, limit_s=100, env=ASYNC, needed=1)[:1])
    assert survivor[0] in ("PeerLostError", "GroupPoisonedError")
    assert survivor[1]


def test_a_call_that_fails_keeps_its_tensors_until_the_device_is_through() -> None:
    """Copies that were issued before the failure still use them, and no stream of the caller waits for those."""
    kept: list[tuple[Any, Any]] = []
    stream, tensor, error = MagicMock(), torch.ones(1), ValueError("in the middle")
    stream.runtime.keep = lambda *args: kept.append(args)
    failing = DeviceCall(stream, lambda: None, MagicMock(side_effect=error), [tensor], is_async=False, timeout_s=20.0)
    with pytest.raises(ValueError, match="in the middle"):
        failing()
    assert [(id(one), on) for one, on in kept] == [(id(tensor), stream.stream)]
    DeviceCall(stream, lambda: None, lambda: None, [tensor], is_async=False, timeout_s=20.0)()
    assert len(kept) == 1


def test_a_full_device_leads_to_smaller_slots() -> None:
    """Chunks are halved until the first rank has the block."""
    big = {**FAKE, "RAY_FRACBACKEND_IPC_DEVICE_CHUNK_BYTES": str(1 << 20)}
    env = lambda rank: {**big, "FAKE_CUDA_FREE": str(6 << 18)} if rank == 0 else big  # noqa: E731
    for reports, _ in values(run_ranks(carried_by, 2, limit_s=120, env=env)):
        assert reports == [(None, True, 1 << 18)]


def test_groups_that_come_and_go_free_their_memory() -> None:
    """A block is freed when no rank has it mapped any more, at the latest by the next group."""
    for rank, (reports, released) in enumerate(values(run_ranks(carried_by, 3, 4, limit_s=120, env=FAKE))):
        assert reports == [(None, True, 65536)] * 4
        if rank == 0:
            assert released in ([False] * 3, [False] * 4)
        else:
            assert released == [True] * 4


@pytest.mark.parametrize(
    "name", ["all_reduce", *(pytest.param(name, marks=pytest.mark.full) for name in ("broadcast", "all_to_all"))]
)
def test_a_killed_rank_is_reported_at_every_phase(name: str, full: bool) -> None:
    """As in host memory: both survivors raise an error at once, and leave without waiting for the device."""
    actions = phases(name) if full else phases(name)[::3]
    check_signal(name, "kill", 20.0, {"PeerLostError", "GroupPoisonedError"}, ASYNC, actions)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name in CALLS if name not in ("all_reduce", "broadcast", "all_to_all", "barrier")]
)
def test_a_killed_rank_is_reported_by_every_other_collective(name: str) -> None:
    """As above; a barrier moves nothing and runs on the host."""
    check_signal(name, "kill", 20.0, {"PeerLostError", "GroupPoisonedError"}, ASYNC)


@pytest.mark.full
def test_a_stopped_rank_is_reported_at_every_phase() -> None:
    """Both survivors raise an error after the deadline."""
    check_signal("all_reduce", "stop", 2.0, {"CollectiveTimeoutError", "GroupPoisonedError"}, ASYNC)


def test_an_exception_at_any_phase_reaches_every_rank() -> None:
    """The failed rank raises its own error; the others raise an error that names it."""
    for rank, reports in enumerate(values(run_ranks(struck_by_exception, 3, ["all_reduce"], limit_s=120, env=ASYNC))):
        for name, phase, error_type, text, _ in reports:
            assert "injected" in text, (name, phase, error_type, text)
            struck = LEADER if phase == "FOLD" else 2
            assert error_type == ("RuntimeError" if rank == struck else "GroupPoisonedError"), (name, phase, text)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 8))])
def test_random_faults_in_random_schedules(seed: int) -> None:
    """After any fault at any time, every surviving rank raises an error soon."""
    check_random(seed, "device", ASYNC)


def first_call(job: Job) -> tuple[str, str, float]:
    """Make the call that sets up device memory."""
    pg = bare_group(job, "first", job.rank, job.size, 20.0)
    return error_of(lambda: CALLS["all_reduce"](pg))


def test_a_rank_that_dies_during_set_up_is_reported() -> None:
    """The survivors do not wait for the rest of the set-up."""
    env = lambda rank: {**ASYNC, "FAKE_CUDA_BROKEN": "die"} if rank == 2 else ASYNC  # noqa: E731
    outcomes = run_ranks(first_call, 3, limit_s=120, env=env, needed=2)
    for error_type, text, _ in values(outcomes[:2]):
        assert error_type in ("PeerLostError", "GroupPoisonedError"), text


def other_device(job: Job) -> list[tuple[str, str, float]]:
    """Rank 0 makes a call on the device and rank 1 one on the host; then the same before there is device memory."""
    reports = []
    for number, early in enumerate((False, True)):
        pg = (bare_group if early else device_group)(job, str(number), job.rank, job.size, 10.0)
        call = CALLS["all_reduce"] if job.rank == 0 else CALLS["barrier"]
        reports.append(error_of(lambda pg=pg, call=call: (call(pg), pg.barrier(options("Barrier")))))
        pg.shutdown()
    return reports


def test_calls_on_host_and_device_that_meet_are_named_with_both_sides() -> None:
    """The two kinds of memory count their steps separately, but a rank that used the other one is detected."""
    for reports in values(run_ranks(other_device, 2, limit_s=120, env=ASYNC)):
        for error_type, text, _ in reports:
            assert error_type in ("CollectiveMismatchError", "GroupPoisonedError"), text
            assert "all_reduce(float32[66000], SUM)" in text
            assert "barrier" in text


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_some_hundred_overlapping_calls_on_two_groups_are_exact(size: int) -> None:
    """Asynchronous calls whose streams run late by random times."""
    assert values(run_ranks(busy, size, 300, limit_s=120, env=FAKE)) == [0] * size
