"""Backend ``staged``, and ipc without device memory, with a fake device whose streams run late."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeEvent, FakeGpu, FakeStream
from ipc_calls import bare_group, options
from ipc_conformance_calls import aliased
from ipc_device_calls import CALLS, NUMEL
from ipc_device_faults import call_then_barrier, check_signal
from ipc_fault_runs import error_of, strike
from ipc_harness import TAKES_TYPES, Job, rank_device, run_ranks, typed, values
from ipc_random_faults import check_random
from ipc_staged_calls import points, staged_group, strike_at
from ipc_table import SMALL_CHUNKS, whole_table
from ipc_workloads import busy
from test_ipc_torch import compiled, ddp_cases, fsdp, meshes_and_objects, odd_uses, zero_optimizer

from ray_fracbackend.ipc.device import staged
from ray_fracbackend.ipc.device.runtime import AcceleratorRuntime
from ray_fracbackend.ipc.protocol.gloo import GlooCollectives

FAKE = {**SMALL_CHUNKS, "RAY_FRACBACKEND_STAGED_CHUNK_BYTES": "65536", "FAKE_CUDA_SEED": "1"}
STAGED = {**FAKE, "IPC_TEST_BACKEND": "staged", "IPC_TEST_STAGED": "over shared host memory"}
OVER_GLOO = {**STAGED, "RAY_FRACBACKEND_STAGED_INNER": "gloo", "IPC_TEST_STAGED": "over Gloo: "}
# ipc without device memory.
IN_IPC = {**FAKE, "FAKE_CUDA_BROKEN": "missing", "IPC_TEST_STAGED": "rank 0: the fake device is missing"}
WAYS = {"over ipc": STAGED, "over Gloo": OVER_GLOO, "in ipc": IN_IPC}
_linux = pytest.mark.linux(reason="needs shared host memory")
ALL_WAYS = [pytest.param("over ipc", marks=_linux), "over Gloo", pytest.param("in ipc", marks=_linux)]
BOTH_WAYS = ALL_WAYS[:2]
# For tests above the inner backend. Windows has only Gloo.
ONE_WAY = [ALL_WAYS[0], pytest.param("over Gloo", marks=pytest.mark.full(but="win32"))]
# A separate device type, whose default stream also runs late, through torch's own functions for streams and events.
TYPED = {
    way: {name: value for name, value in env.items() if not name.startswith("FAKE")}
    | {"IPC_TEST_DEVICE": "fake:0", "IPC_TEST_BACKEND": "cpu:gloo,fake:staged"}
    for way, env in (("over ipc", STAGED), ("over Gloo", OVER_GLOO))
}
# Callers also have a stream, so nothing blocks on a device whose peer is dead.
ASYNC = {"FAKE_CUDA_ASYNC": "1"}
DTYPES = [torch.float32, torch.bfloat16, torch.uint16, torch.bool]
LOST = {"PeerLostError", "GroupPoisonedError"}


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3, 4))])
def test_every_collective_matches_the_reference(size: int, way: str, full: bool) -> None:
    """The table of the host's tests, each chunk through pinned memory."""
    env = dict(WAYS[way])
    if way == "in ipc" and size == 1:  # it needs neither
        del env["IPC_TEST_STAGED"]
    for failures in values(run_ranks(whole_table, size, DTYPES, full, limit_s=200, env=env)):
        assert failures == []


# One letter per rank: its host.
@pytest.mark.parametrize(("way", "hosts"), [pytest.param("in ipc", "aab", marks=pytest.mark.full), ("over ipc", "aba")])
@_linux
def test_every_collective_is_right_between_hosts(way: str, hosts: str, full: bool) -> None:
    """ipc stages through its leaders; staged uses Gloo and reports it."""
    how = {
        "IPC_TEST_STAGED": "the ranks are on several hosts"
        if way == "in ipc"
        else "over Gloo: the ranks are on 2 hosts"
    }
    env = lambda rank: {**WAYS[way], **how, "RAY_FRACBACKEND_IPC_HOST": hosts[rank]}  # noqa: E731
    for failures in values(run_ranks(whole_table, 3, [torch.float32, torch.bool], full, limit_s=200, env=env)):
        assert failures == []


@pytest.mark.parametrize("way", ONE_WAY)
def test_every_collective_of_cpu_tensors_matches_the_reference(way: str, full: bool) -> None:
    """They take the same path without the copies."""
    env = {name: value for name, value in WAYS[way].items() if not name.startswith("FAKE")}
    dtypes = [*DTYPES, torch.float16, torch.int64, torch.complex64]
    for failures in values(run_ranks(whole_table, 3, dtypes, full, limit_s=200, env=env)):
        assert failures == []


@typed
@pytest.mark.parametrize("way", ONE_WAY)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_every_collective_on_an_accelerator_of_its_own_type(size: int, way: str, full: bool) -> None:
    """torch itself refuses to mix its tensors with those of the host."""
    for failures in values(run_ranks(whole_table, size, DTYPES, full, limit_s=200, env=TYPED[way])):
        assert failures == []


def ddp_on(job: Job, dtype: torch.dtype) -> list[torch.Tensor]:
    """Run some steps of DDP on the rank's device, with parameters of a type."""
    from torch.nn.parallel import DistributedDataParallel

    job.init()
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(rank_device(), dtype), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + job.rank))
        model(inputs.to(rank_device(), dtype)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@typed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ONE_WAY)
def test_ddp_on_an_accelerator_of_its_own_type(way: str, dtype: torch.dtype) -> None:
    """torch's reducer in C++ has the same weights as with Gloo on the host. With two ranks a sum has only one order."""
    ours = values(run_ranks(ddp_on, 2, dtype, limit_s=120, env=TYPED[way]))
    theirs = values(run_ranks(ddp_on, 2, dtype, limit_s=120, env={"IPC_TEST_BACKEND": "gloo"}))
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, other))


def messages(job: Job) -> list[Any]:
    """Send device tensors between ranks, in each form of torch's; return the error of a receive without an answer."""
    job.init()
    device, after, before = rank_device(), (job.rank + 1) % job.size, (job.rank - 1) % job.size
    received = [torch.zeros(2, 3, device=device).t() for _ in range(3)]
    own = torch.arange(6.0).to(device).view(2, 3).t() + 10 * job.rank
    ops = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, received[0], before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if job.rank == 0:
        dist.send(own, 1, tag=5)
        sender = dist.recv(received[1])
        dist.recv(received[2], 2, tag=7)
    else:
        if job.rank == 1:
            dist.recv(received[1], 0, tag=5)
            dist.send(own, 0)
        else:
            dist.send(own, 0, tag=7)
        sender = None
    pending = dist.irecv(received[0].clone(), before, tag=99)
    failed = error_of(lambda: pending.wait(timedelta(seconds=0.2)))
    return [[tensor.cpu().tolist() for tensor in received], sender, failed[0], pending.is_completed()]


@typed
@pytest.mark.parametrize("way", BOTH_WAYS)
def test_point_to_point(way: str) -> None:
    """Through the host; plain Gloo has none for CUDA tensors."""

    def data(rank: int) -> list[list[float]]:
        return (torch.arange(6.0).view(2, 3).t() + 10 * rank).tolist()

    zero = torch.zeros(3, 2).tolist()
    found = values(run_ranks(messages, 3, limit_s=60, env=TYPED[way]))
    expected = [[data(2), data(1), data(2)], [data(0), data(0), zero], [data(1), zero, zero]]
    assert [one[0] for one in found] == expected
    assert found[0][1] == 1
    assert [one[2:] for one in found] == [["RuntimeError", False]] * 3


# What each leaves out: the host's wait for a copy; the second buffer; the copies; the copy of an input that crosses the outputs' chunks.
def _no_wait() -> None:
    staged._wait_for = lambda event, terms: None


def _one_buffer() -> None:
    take = staged.PinnedPool._take
    staged.PinnedPool.borrow = contextlib.contextmanager(
        lambda self, count, num_bytes, stream: iter([[take(self, max(num_bytes, 1), stream)] * count])
    )


def _host_of_device() -> None:
    """Pass the device's tensor to the host's collectives."""

    def reduce(self: Any, tensor: torch.Tensor, root: int | None, reduction: Any, terms: Any) -> None:
        self._host.reduce(tensor, root, reduction, terms)

    staged.StagedCollectives.reduce = reduce


def _no_clone() -> None:
    staged.overlaps_shifted = lambda tensor, others: False


MUTANTS: dict[str, tuple[Callable[[], None], Callable[[Job], Any]]] = {
    "no wait": (_no_wait, lambda job: whole_table(job, [torch.float32], False)),
    "one buffer": (_one_buffer, lambda job: whole_table(job, [torch.float32], False)),
    "host's collectives on the device": (_host_of_device, lambda job: whole_table(job, [torch.float32], False)),
    "no clone": (_no_clone, lambda job: aliased(job, 120_000)),
}


# They create tensors of the CPU.
FAKE_CUDA_ALONE = ("no clone",)


def mutated(job: Job, name: str, changed: bool) -> str:
    """Return the errors if a step is left out."""
    mutate, run = MUTANTS[name]
    if changed:
        mutate()
    try:
        return str(run(job) or "")
    except (RuntimeError, AssertionError) as error:
        return str(error)


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_step_that_is_left_out_is_a_wrong_result(name: str) -> None:
    """The fake device detects each missing wait, and reports nothing if none is missing."""
    over = "over ipc" if sys.platform == "linux" else "over Gloo"
    envs = [WAYS[over], *([TYPED[over]] if TAKES_TYPES and name not in FAKE_CUDA_ALONE else [])]
    for env in envs:
        assert any(values(run_ranks(mutated, 2, name, True, limit_s=120, env=env)))
        assert values(run_ranks(mutated, 2, name, False, limit_s=120, env=env)) == [""] * 2


@pytest.mark.parametrize("numel", [12, 120_000])
@pytest.mark.parametrize("way", ONE_WAY)
def test_input_and_output_may_share_memory(way: str, numel: int) -> None:
    """Either may be part of the other, in one chunk and in several."""
    assert values(run_ranks(aliased, 3, numel, env=WAYS[way])) == [[]] * 3


@pytest.mark.parametrize("way", [*ONE_WAY, pytest.param("in ipc", marks=[_linux, pytest.mark.full])])
def test_ddp_and_its_hooks_end_with_the_same_weights_as_gloo(way: str) -> None:
    """Buckets use futures that complete only after the device has reached them; also with bf16."""
    for different in values(run_ranks(ddp_cases, 2, limit_s=120, env=WAYS[way])):
        assert different == []


@pytest.mark.parametrize("way", ONE_WAY)
@pytest.mark.parametrize("function", [zero_optimizer, fsdp, pytest.param(compiled, marks=pytest.mark.full)])
def test_same_results_as_on_gloo(function: Callable[..., Any], way: str) -> None:
    """ZeroRedundancyOptimizer, FSDP2, functional collectives and a compiled DDP have exactly the same results as with Gloo."""
    ours = values(run_ranks(function, 2, "cpu:gloo,cuda:staged", limit_s=120, env=WAYS[way]))
    theirs = values(run_ranks(function, 2, "gloo", limit_s=120))
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = (list(x.values()) if isinstance(x, dict) else x for x in (mine, other))
        for one, two in zip(mine, other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("way", [*ONE_WAY, pytest.param("in ipc", marks=[_linux, pytest.mark.full])])
def test_meshes_objects_and_odd_tensors(way: str) -> None:
    """Sub-groups, and tensors that are not dense, which use Gloo as a copy on the host."""
    for result in values(run_ranks(meshes_and_objects, 4, limit_s=120, env=WAYS[way])):
        assert result["coalesced"] == [[6.0] * 2, [6.0] * 3]
        assert result["objects"] == [0, 1, 2, 3]
        assert result["backend"] == result["sub-backend"]
    for bad in values(run_ranks(odd_uses, 2, limit_s=120, env=WAYS[way])):
        assert bad == []


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", ONE_WAY)
def test_some_hundred_overlapping_calls_on_two_groups_are_exact(way: str, size: int) -> None:
    """Asynchronous calls of groups that share pinned buffers, on streams that run late by random times."""
    assert values(run_ranks(busy, size, 300, limit_s=120, env=WAYS[way])) == [0] * size


def under_inference_mode(job: Job) -> list[float]:
    """Make a first call in inference mode, whose buffers are reused outside of it."""
    job.init()
    with torch.inference_mode():
        first = torch.full((3,), job.rank + 1.0)
        dist.all_reduce(first)
    second = torch.full((3,), job.rank + 2.0)
    dist.all_reduce(second)
    return [*first.tolist(), *second.tolist()]


@pytest.mark.parametrize("way", ONE_WAY)
def test_buffers_made_in_inference_mode_serve_other_calls(way: str) -> None:
    """torch does not allow writes to an inference tensor outside inference mode."""
    assert values(run_ranks(under_inference_mode, 2, limit_s=60, env=WAYS[way])) == [[3.0] * 3 + [5.0] * 3] * 2


# Failures.


@pytest.mark.parametrize("way", BOTH_WAYS)
@pytest.mark.parametrize(
    "name",
    ["all_reduce", *(pytest.param(n, marks=pytest.mark.full) for n in CALLS if n not in ("all_reduce", "barrier"))],
)
def test_a_killed_rank_is_reported_at_every_step(name: str, way: str, full: bool) -> None:
    """Both survivors raise an error at once."""
    where = points(name) if full else points(name)[::3]
    check_signal(name, "kill", 20.0, LOST, {**WAYS[way], **ASYNC}, where, "staged")


@pytest.mark.parametrize("way", [BOTH_WAYS[0], pytest.param(BOTH_WAYS[1], marks=pytest.mark.full(but="win32"))])
def test_a_stopped_rank_is_reported(way: str) -> None:
    """Both survivors raise an error after the deadline, or when the other has."""
    allowed = {"CollectiveTimeoutError", "GroupPoisonedError"}
    check_signal("all_reduce", "stop", 2.0, allowed, {**WAYS[way], **ASYNC}, points("all_reduce")[1:9:5], "staged")


def struck_by_exception(job: Job, name: str) -> list[Any]:
    """Run a collective in whose every step the last rank raises an error, each in a new group."""
    torch.set_num_threads(1)
    reports = []
    wait_for = staged._wait_for
    for point in points(name):
        pg = staged_group(job, f"{name}{point}", job.rank, job.size, 60.0)
        if job.rank == job.size - 1:
            strike_at(pg, point, lambda: strike("raise"))
        reports.append((point, *error_of(lambda pg=pg: call_then_barrier(pg, name))))
        staged._wait_for = wait_for
        pg.shutdown()
    return reports


@pytest.mark.parametrize("way", BOTH_WAYS)
def test_an_exception_at_any_step_reaches_every_rank(way: str) -> None:
    """The failed rank raises its own error; the others raise an error with its message soon."""
    env = {**WAYS[way], **ASYNC}
    for rank, reports in enumerate(values(run_ranks(struck_by_exception, 3, "all_reduce", limit_s=120, env=env))):
        for point, error_type, text, seconds in reports:
            if rank == 2:
                assert (error_type, "injected" in text) == ("RuntimeError", True), (point, text)
            else:
                assert (error_type, "injected" in text) == ("GroupPoisonedError", True), (point, text)
            assert seconds < 15


@pytest.mark.parametrize("way", BOTH_WAYS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 20))])
def test_random_faults_in_random_schedules(seed: int, way: str) -> None:
    """After any fault at any time, every surviving rank raises an error soon."""
    check_random(seed, "staged", {**WAYS[way], **ASYNC})


def gone_unnoticed(job: Job, how: str) -> tuple[str, str, float]:
    """Make a call that rank 1 misses in a way that keeps its connections open, as on Windows."""
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
    return error_of(lambda: CALLS["all_reduce"](pg))


@pytest.mark.parametrize(
    ("how", "text"),
    [("killed", "died before"), pytest.param("left", "shut its process group down before", marks=pytest.mark.full)],
)
def test_a_rank_whose_end_gloo_does_not_notice_is_reported(how: str, text: str) -> None:
    """It is detected by its process and by the store, with its rank and long before the call's limit."""
    outcomes = run_ranks(gone_unnoticed, 2, how, limit_s=60, env={**OVER_GLOO, **ASYNC}, needed=1)
    error_type, found, seconds = values(outcomes[:1])[0]
    assert error_type == "PeerLostError"
    assert re.match(rf"rank 1 .*{text} it reached all_reduce\(float32\[66000\], SUM\)\.|rank 1 {text}", found), found
    assert seconds < 15


def never_through(job: Job) -> tuple[str, str, float]:
    """Make a call on a device that never runs it."""
    import fake_cuda

    pg = staged_group(job, "stuck", job.rank, job.size, 20.0)
    pg.set_timeout(timedelta(seconds=1.5 if job.rank == 0 else 15))
    if job.rank == 0:
        stream = next(iter(pg._device_side._streams.values())).stream
        stream.wait_event(fake_cuda.FakeEvent(fake_cuda.FakeCuda.gpu, [1, 0]))
    return error_of(lambda: CALLS["all_reduce"](pg))


@pytest.mark.parametrize("way", ONE_WAY)
def test_a_device_that_hangs_ends_the_call_on_every_rank(way: str) -> None:
    """Its own rank reports it at its deadline, with the advice; the others report it then, not at their own deadline."""
    first, second = values(run_ranks(never_through, 2, limit_s=60, env={**WAYS[way], **ASYNC}))
    assert first[0] == "CollectiveTimeoutError"
    assert "The device of this rank did not reach all_reduce(float32[66000], SUM) in time" in first[1]
    assert second[0] in LOST
    assert max(first[2], second[2]) < 10


def different_calls(job: Job) -> tuple[str, str, float]:
    """Rank 0 calls a reduction and rank 1 a gather."""
    pg = staged_group(job, "different", job.rank, job.size, 20.0)
    return error_of(lambda: CALLS["all_reduce" if job.rank == 0 else "all_gather"](pg))


@pytest.mark.parametrize("way", BOTH_WAYS)
def test_ranks_that_call_different_collectives_get_an_error_with_both(way: str) -> None:
    """There are no wrong results."""
    for error_type, text, _ in values(run_ranks(different_calls, 2, limit_s=60, env={**WAYS[way], **ASYNC})):
        assert error_type in ("CollectiveMismatchError", "GroupPoisonedError"), text
        assert "all_reduce(float32[66000], SUM)" in text
        assert "all_gather(float32[66000])" in text


def wrong_setting(job: Job) -> tuple[str, str, float]:
    """Create a group and make its first call with a wrong variable on one rank."""
    return error_of(lambda: CALLS["all_reduce"](bare_group(job, "wrong", job.rank, job.size, 20.0)))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("CHUNK_BYTES", "1k", "must be an integer from 65536 to 268435456; unset it for 4194304."),
        ("INNER", "tcp", "must be 'auto' or 'gloo'; unset it for 'auto'."),
    ],
)
@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_wrong_setting_of_one_rank_is_every_rank_s_error(way: str, name: str, value: str, rule: str) -> None:
    """The error contains rank, value, rule and fix. ipc does not use the second variable."""
    variable = f"RAY_FRACBACKEND_STAGED_{name}"
    env = lambda rank: {**WAYS[way], **({variable: value} if rank else {})}  # noqa: E731
    for error_type, text, _ in values(run_ranks(wrong_setting, 2, limit_s=60, env=env)):
        if way == "in ipc" and name == "INNER":
            assert error_type == ""
        else:
            assert (error_type, text) == ("IpcUnavailableError", f"rank 1: {variable}={value!r} {rule}")


def sums_with_chunks(job: Job) -> list[float]:
    """Compute a sum over several chunks with different chunk sizes on the ranks."""
    pg = bare_group(job, "chunks", job.rank, job.size, 20.0)
    tensor = torch.arange(NUMEL * 4, dtype=torch.float64) + job.rank
    pg.allreduce([tensor], options("Allreduce")).wait()
    return [float((tensor - 2 * torch.arange(NUMEL * 4, dtype=torch.float64)).min()), float(tensor[-1])]


def test_ranks_agree_on_the_size_of_a_chunk() -> None:
    """They use the smallest."""
    env = lambda rank: {**OVER_GLOO, "RAY_FRACBACKEND_STAGED_CHUNK_BYTES": str(65536 << (3 * rank))}  # noqa: E731
    assert values(run_ranks(sums_with_chunks, 2, limit_s=60, env=env)) == [[1.0, 2.0 * (NUMEL * 4 - 1) + 1]] * 2


def kept(job: Job) -> tuple[int, int]:
    """Return pinned bytes that a process keeps after calls of many sizes on several groups, and the largest buffer."""
    logging.disable(logging.CRITICAL)
    job.init()
    groups = [dist.new_group() for _ in range(3)]
    for numel in (1, 3_000, 20_000, 70_000):
        works = [dist.all_reduce(torch.ones(numel), group=group, async_op=True) for group in groups]
        for work in works:
            work.wait()
    time.sleep(0.1)
    (pool,) = staged._pools.values()
    sizes = [buffer.numel() for buffer, _ in pool._idle]
    return sum(sizes), max(sizes)


def test_the_pool_of_pinned_buffers_is_shared_and_bounded() -> None:
    """Three groups keep no more than the buffers that were in use at the same time."""
    for total, largest in values(run_ranks(kept, 2, limit_s=60, env=OVER_GLOO)):
        assert largest == 65536
        assert total <= 3 * 2 * 65536


def test_the_next_user_of_a_buffer_waits_for_the_last() -> None:
    """The next user's stream waits, whatever stream the last copies are on."""
    gpu = FakeGpu(0)
    gpu.running.clear()  # nothing has run yet
    first, second = FakeStream(gpu), FakeStream(gpu)
    runtime: Any = SimpleNamespace(
        pinned=lambda n: torch.empty(n, dtype=torch.uint8), new_event=lambda: FakeEvent(gpu, [0, 0])
    )
    pool, done, address = staged.PinnedPool(runtime), [], 0
    for name, stream in (("first", first), ("second", second)):
        with pool.borrow(1, 100, stream) as buffers:
            stream.issue(lambda name=name: done.append(name))
            address = buffers[0].data_ptr() if name == "first" else address
            assert buffers[0].data_ptr() == address
    # By itself the second stream cannot continue.
    assert not second.queue[0][0]()
    gpu.running.set()
    first.synchronize()
    second.synchronize()
    gpu.close()
    assert done == ["first", "second"]


def test_a_buffer_above_the_bound_is_not_kept() -> None:
    """The least recently used buffer is freed."""

    class Runtime:
        def pinned(self, num_bytes: int) -> torch.Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8)

        def new_event(self) -> Any:
            return self

        def record(self, stream: Any) -> None:
            pass

        wait_event = record

    runtime: Any = Runtime()
    pool = staged.PinnedPool(runtime, 300_000)
    for num_bytes in (1, 70_000, 200_000):
        with pool.borrow(1, num_bytes, runtime):
            pass
    assert [buffer.numel() for buffer, _ in pool._idle] == [262_144]
    with pytest.raises(ZeroDivisionError), pool.borrow(1, 200_000, runtime):
        raise ZeroDivisionError  # the stream's state after it is undefined
    assert pool._idle == []


def test_a_device_without_streams_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Apple's, whose module in torch has no streams."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.mps)
    with pytest.raises(
        ValueError, match="a tensor on mps:0, and torch has no streams for such a device; pass a copy on the CPU"
    ):
        AcceleratorRuntime(torch.device("mps:0"))
