"""Tensors of a fake device whose streams run late, on each way of ipc and ``staged``; and what is special about staging.

test_ipc_device.py tests what is special about device memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from fake_cuda import FakeCuda, FakeEvent
from ipc_calls import DEVICE_CALLS, DEVICE_NUMEL, bare_group, error_of, options, strike
from ipc_harness import Job, on_ranks, run_ranks, values
from ipc_memories import LOST, MEMORIES, check_exceptions, check_random, check_signal, staged_group
from ipc_table import SMALL_CHUNKS, check_table
from ipc_workloads import aliased, busy
from test_ipc_torch import FUNCTIONS, USES, check_as_on_gloo

from ray_fracbackend.ipc.device.runtime import AcceleratorRuntime
from ray_fracbackend.ipc.protocol.gloo import GlooCollectives

FAKE = {**SMALL_CHUNKS, "RAY_FRACBACKEND_STAGED_CHUNK_BYTES": "65536", "FAKE_CUDA_SEED": "1"}
STAGED = {**FAKE, "IPC_TEST_BACKEND": "staged", "IPC_TEST_STAGED": "over shared host memory"}
OVER_GLOO = {**STAGED, "RAY_FRACBACKEND_STAGED_INNER": "gloo", "IPC_TEST_STAGED": "over Gloo: "}
# ipc without device memory.
IN_IPC = {**FAKE, "FAKE_CUDA_BROKEN": "missing", "IPC_TEST_STAGED": "rank 0: the fake device is missing"}
WAYS = {"over ipc": STAGED, "over Gloo": OVER_GLOO, "in ipc": IN_IPC, "device": FAKE}
full = pytest.mark.full
_linux = pytest.mark.linux(reason="needs shared host memory")
STAGED_WAYS = [pytest.param("over ipc", marks=_linux), "over Gloo", pytest.param("in ipc", marks=_linux)]
BOTH_WAYS = STAGED_WAYS[:2]
# For tests above the inner backend. Windows has only Gloo.
ONE_WAY = [STAGED_WAYS[0], pytest.param("over Gloo", marks=full(but="win32"))]
DEVICE = pytest.param("device", marks=_linux)
# Callers also have a stream, so nothing blocks on a device whose peer is dead.
ASYNC = {"FAKE_CUDA_ASYNC": "1"}
DTYPES = [torch.float32, torch.bfloat16, torch.uint16, torch.bool]


def of_way(rank: int, way: str, **_: Any) -> dict[str, str]:
    """Return the variables of a rank for a way."""
    return WAYS[way]


def of_way_async(rank: int, way: str, **_: Any) -> dict[str, str]:
    """As `of_way`; callers also have a stream."""
    return {**WAYS[way], **ASYNC}


@pytest.mark.parametrize("way", [*STAGED_WAYS, pytest.param("device", marks=[_linux, full])])
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=full) for size in (1, 3, 4))])
def test_every_collective_matches_the_reference(size: int, way: str, full: bool) -> None:
    """The table of the host's tests, each chunk through pinned or device memory."""
    env = dict(WAYS[way])
    if way == "in ipc" and size == 1:  # it needs neither
        del env["IPC_TEST_STAGED"]
    check_table(size, DTYPES, full, env)


@pytest.mark.parametrize("way", ONE_WAY)
def test_every_collective_of_cpu_tensors_matches_the_reference(way: str, full: bool) -> None:
    """They take the same path without the copies."""
    env = {name: value for name, value in WAYS[way].items() if not name.startswith("FAKE")}
    check_table(3, [*DTYPES, torch.float16, torch.int64, torch.complex64], full, env)


@pytest.mark.parametrize("numel", [12, 12_000])
@pytest.mark.parametrize("way", ONE_WAY)
def test_input_and_output_may_share_memory(way: str, numel: int) -> None:
    """Either may be part of the other, in one chunk and in several."""
    values(run_ranks(aliased, 3, numel, env=WAYS[way]))


@pytest.mark.parametrize("way", [*ONE_WAY, pytest.param("in ipc", marks=[_linux, full]), DEVICE])
@pytest.mark.parametrize("use", USES)
def test_uses(use: Callable[[Job], None], way: str) -> None:
    """Buckets use futures that complete only after the device has reached them; tensors that are not dense use Gloo.

    Sub-groups have their own device memory.
    """
    values(run_ranks(use, USES[use], env=WAYS[way]))


@pytest.mark.parametrize("way", ONE_WAY)
@pytest.mark.parametrize("function", FUNCTIONS[1:])
def test_same_results_as_on_gloo(function: Callable[..., Any], way: str) -> None:
    """ZeroRedundancyOptimizer, FSDP2, functional collectives and a compiled DDP."""
    check_as_on_gloo(function, "cpu:gloo,cuda:staged", WAYS[way])


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=full)])
@pytest.mark.parametrize("way", [*ONE_WAY, DEVICE])
def test_some_hundred_overlapping_calls_on_two_groups_are_exact(way: str, size: int) -> None:
    """Asynchronous calls of groups, on streams that run late by random times."""
    values(run_ranks(busy, size, 300, env=WAYS[way]))


# Failures.


def memory_of(way: str) -> str:
    return "device" if way == "device" else "staged"


# A barrier moves nothing and runs on the host.
MOVING = [name for name in DEVICE_CALLS if name not in ("all_reduce", "barrier")]


@pytest.mark.parametrize("way", [*BOTH_WAYS, DEVICE])
@pytest.mark.parametrize("name", ["all_reduce", *(pytest.param(name, marks=full) for name in MOVING)])
def test_a_killed_rank_is_reported_at_every_step(name: str, way: str, full: bool) -> None:
    """Both survivors raise an error at once, and leave without waiting for the device."""
    points = MEMORIES[memory_of(way)].points(name, 3)[:: 1 if full else 3]
    check_signal(name, "kill", {**WAYS[way], **ASYNC}, points, memory_of(way))


@full(but="win32")
@pytest.mark.parametrize("way", [*ONE_WAY, DEVICE])
def test_a_stopped_rank_is_reported(way: str) -> None:
    """Both survivors raise an error after the deadline, or when the other has."""
    points = MEMORIES[memory_of(way)].points("all_reduce", 3)
    points = points if way == "device" else points[1:9:5]
    check_signal("all_reduce", "stop", {**WAYS[way], **ASYNC}, points, memory_of(way))


@pytest.mark.parametrize("way", [*ONE_WAY, DEVICE])
def test_an_exception_at_any_step_reaches_every_rank(way: str) -> None:
    """The failed rank raises its own error; the others raise an error with its message soon."""
    check_exceptions(3, {**WAYS[way], **ASYNC}, memory_of(way))


@pytest.mark.parametrize("way", [*BOTH_WAYS, DEVICE])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=full) for n in range(1, 20))])
def test_random_faults_in_random_schedules(seed: int, way: str) -> None:
    """After any fault at any time, every surviving rank raises an error soon."""
    check_random(seed, memory_of(way), {**WAYS[way], **ASYNC})


@pytest.mark.parametrize(
    ("how", "text"), [("killed", "died before"), pytest.param("left", "shut its process group down before", marks=full)]
)
@on_ranks(2, limit_s=60, needed=1, env={**OVER_GLOO, **ASYNC})
def test_a_rank_whose_end_gloo_does_not_notice_is_reported(job: Job, how: str, text: str) -> None:
    """Rank 1 misses a call in a way that keeps its connections open, as on Windows: it is detected by its process and by the store."""
    pg = staged_group(job, how, job.rank, job.size, 60.0)
    if job.rank == 1 and how == "killed":
        # Like a DataLoader worker, it holds the parent's sockets. On Windows none does.
        if sys.platform != "win32" and os.fork() == 0:
            time.sleep(12)
            os._exit(0)
        strike("kill")
    if job.rank == 1:
        GlooCollectives._drop = lambda self, idle=False: None  # type: ignore[method-assign]
        pg.shutdown()
        time.sleep(30)
    error_type, found, seconds = error_of(lambda: DEVICE_CALLS["all_reduce"](pg))
    assert error_type == "PeerLostError"
    assert found.startswith("rank 1 ")
    assert text in found
    assert seconds < 15


@pytest.mark.parametrize("way", ONE_WAY)
@on_ranks(2, limit_s=60, env=of_way_async)
def test_a_device_that_hangs_ends_the_call_on_every_rank(job: Job, way: str) -> None:
    """Its own rank reports it at its deadline; the others report it then, not at their own deadline."""
    pg = staged_group(job, "stuck", job.rank, job.size, 20.0)
    pg.set_timeout(timedelta(seconds=1.5 if job.rank == 0 else 15))
    if job.rank == 0:
        stream = next(iter(pg._device_side._streams.values())).stream
        stream.wait_event(FakeEvent(FakeCuda.gpu, [1, 0]))
    error_type, text, seconds = error_of(lambda: DEVICE_CALLS["all_reduce"](pg))
    assert error_type in (LOST if job.rank else ("CollectiveTimeoutError",))
    assert job.rank or "The device of this rank did not reach all_reduce(float32[66000], SUM) in time" in text
    assert seconds < 10


@on_ranks(2, env=OVER_GLOO)
def test_an_error_of_the_runtime_reaches_the_other_rank(job: Job) -> None:
    """Before any transfer."""
    pg = staged_group(job, "pages", job.rank, job.size, 20.0)
    if job.rank == 0:
        (stream,) = pg._device_side._streams.values()
        stream.runtime.pinned = MagicMock(side_effect=RuntimeError("no pages"))
    error_type, text, _ = error_of(lambda: DEVICE_CALLS["all_reduce"](pg))
    assert error_type == ("GroupPoisonedError" if job.rank else "RuntimeError")
    assert text.endswith("RuntimeError: no pages in all_reduce(float32[66000], SUM)" if job.rank else "no pages"), text


@pytest.mark.parametrize("way", BOTH_WAYS)
@on_ranks(2, limit_s=60, env=of_way_async)
def test_ranks_that_call_different_collectives_get_an_error_with_both(job: Job, way: str) -> None:
    """There are no wrong results."""
    pg = staged_group(job, "different", job.rank, job.size, 20.0)
    error_type, text, _ = error_of(lambda: DEVICE_CALLS["all_reduce" if job.rank == 0 else "all_gather"](pg))
    assert error_type in ("CollectiveMismatchError", "GroupPoisonedError"), text
    assert "all_reduce(float32[66000], SUM)" in text
    assert "all_gather(float32[66000])" in text


@pytest.mark.parametrize(("name", "value"), [("CHUNK_BYTES", "1k"), ("INNER", "tcp")])
@pytest.mark.parametrize("way", [*ONE_WAY, pytest.param("in ipc", marks=[_linux, full])])
@on_ranks(
    2,
    limit_s=60,
    env=lambda rank, way, name, value: {**WAYS[way], **({f"RAY_FRACBACKEND_STAGED_{name}": value} if rank else {})},
)
def test_a_wrong_setting_of_one_rank_is_every_rank_s_error(job: Job, way: str, name: str, value: str) -> None:
    """The error contains rank, value and rule, also in ipc, which uses only the first variable."""
    error_type, text, _ = error_of(
        lambda: DEVICE_CALLS["all_reduce"](bare_group(job, "wrong", job.rank, job.size, 20.0))
    )
    assert error_type == "IpcUnavailableError"
    told = text.removeprefix("The ipc backend cannot be used: ") if way == "in ipc" else text
    assert told.startswith(f"rank 1: RAY_FRACBACKEND_STAGED_{name}={value!r} must be ")


@on_ranks(2, env=lambda rank: {**OVER_GLOO, "RAY_FRACBACKEND_STAGED_CHUNK_BYTES": str(65536 << (3 * rank))})
def test_ranks_agree_on_the_size_of_a_chunk(job: Job) -> None:
    """They use the smallest, in a sum over several chunks."""
    pg = bare_group(job, "chunks", job.rank, job.size, 20.0)
    tensor = torch.arange(DEVICE_NUMEL * 4, dtype=torch.float64) + job.rank
    pg.allreduce([tensor], options("Allreduce")).wait()
    assert torch.equal(tensor, 2 * torch.arange(DEVICE_NUMEL * 4, dtype=torch.float64) + 1)


def test_a_device_without_streams_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Apple's, whose module in torch has no streams."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.mps)
    with pytest.raises(ValueError, match="mps:0"):
        AcceleratorRuntime(torch.device("mps:0"))
