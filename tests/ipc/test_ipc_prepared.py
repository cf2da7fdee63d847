"""The prepared path of a small all_reduce: it does what the engine does, and is used only where it can."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ipc_calls import CHUNK_BYTES, SMALL_CHUNKS, bare_group, error_of, mapped_arenas, options, strike
from ipc_harness import Job, on_ranks, run_ranks, values
from torch.utils._python_dispatch import BaseTorchDispatchMode

from ray_fracbackend.ipc import GroupPoisonedError, knobs
from ray_fracbackend.ipc.group import prepared_calls
from ray_fracbackend.ipc.protocol.prepared import _Outputs
from ray_fracbackend.ipc.protocol.schedule import Action

OPS = {
    torch.float32: ("SUM", "AVG", "PRODUCT", "MIN", "MAX"),
    torch.bfloat16: ("SUM", "AVG", "PRODUCT", "MIN", "MAX"),
    torch.int64: ("SUM", "MIN", "MAX", "BAND", "BOR", "BXOR"),
    torch.uint8: ("SUM", "MAX"),
    torch.uint32: ("SUM", "MIN"),
    torch.bool: ("SUM", "BAND"),
}


def all_reduce(pg: Any, tensor: torch.Tensor, op: str = "SUM", **fields: Any) -> torch.Tensor:
    pg.allreduce([tensor], options("Allreduce", reduceOp=getattr(dist.ReduceOp, op), **fields)).wait()
    return tensor


def data(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if dtype.is_floating_point:
        tensor = torch.randn(shape, generator=generator).to(dtype)
        if shape and tensor.numel():
            # A NaN with the seed in it: a sum has that of its first term.
            bits = {4: torch.int32, 2: torch.int16}[tensor.itemsize]
            tensor.view(-1).view(bits)[0] = 0x7FC00000 + seed if tensor.itemsize == 4 else 0x7FC0 + seed % 32
        return tensor
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def announcements(pg: Any) -> list[tuple[Any, ...]]:
    """Return a list that gets this rank's announcements."""
    waiter, found = pg._local.engine.waiter, []
    publish = waiter.publish

    def noted(written: int, read: int, done: int) -> None:
        found.append((waiter.num_calls, written, read, done))
        publish(written, read, done)

    waiter.publish = noted
    return found


def has_folded(announced: tuple[int, int, int, int]) -> bool:
    """Return whether an announcement is the one between two passes."""
    _, written, read, done = announced
    return written == read > done


KINDS = ("Allreduce", "Allgather", "ReduceScatter")
PLACES = ("apart", "in place", "shifted")


def made(job: Job, pg: Any, kind: str, whole: torch.Tensor, place: str, opts: Any) -> torch.Tensor:
    """Make a call with the parts of all ranks in `whole`, and with this rank's part apart from it or in it; return the result's bytes."""
    part = whole[job.rank]
    if place == "apart":
        part = part.clone()
    elif place == "shifted" and part.numel() > 1:
        part = whole.view(-1)[1 : part.numel() + 1].view(part.shape)
    if kind == "Allreduce":
        output, work = part, pg.allreduce([part], opts)
    elif kind == "Allgather":
        output, work = whole, pg._allgather_base(whole, part, opts)
    else:
        output, work = part, pg._reduce_scatter_base(part, whole, opts)
    work.wait()
    return output.clone().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("size", "slots"),
    [(2, 4), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((2, 2), (3, 2), (3, 4), (4, 2), (4, 4)))],
)
@on_ranks(env=lambda rank, size, slots: {knobs.SLOTS_ENV_VAR: str(slots)})
def test_ranks_on_either_path_have_bitwise_the_results_of_the_engine(job: Job, size: int, slots: int) -> None:
    """The same random calls in two groups; in one of them each rank chooses its path at random. With three ranks also in two passes."""
    plain, mixed = (bare_group(job, name, job.rank, job.size, 30.0) for name in ("plain", "mixed"))
    announced = [announcements(pg) for pg in (plain, mixed)]
    plain._prepared_calls.find = lambda *args: None
    prepared, own = mixed._prepared_calls.find, random.Random(7000 + job.rank)
    used = []

    def sometimes(*args: Any) -> Any:
        found = prepared(*args) if own.random() < 0.7 else None
        used.append(found is not None)
        return found

    mixed._prepared_calls.find = sometimes
    calls = random.Random(7)
    shapes = [(), (1,), (3, 5), (1024,), (4096,), (0,), (20_000,), (41, 1001), (100_003,)]

    for number in range(300):
        dtype = calls.choice(list(OPS))
        kind, place, is_async = calls.choice(KINDS), calls.choice(PLACES), calls.random() < 0.3
        # All parts of a reduce_scatter in one chunk: with several, the announcements depend on the time.
        op, shape = calls.choice(OPS[dtype]), calls.choice(shapes[:-2] if kind == "ReduceScatter" else shapes)
        has_big, big_numel, results = calls.random() < 0.2, calls.choice((30_000, 200_000)), []
        for pg in (plain, mixed):
            big = torch.ones(big_numel)
            work = pg.allreduce([big], options("Allreduce", asyncOp=True)) if has_big else None
            whole = data(dtype, (size, *shape), 1000 * number + job.rank)
            results.append(
                made(job, pg, kind, whole, place, options(kind, reduceOp=getattr(dist.ReduceOp, op), asyncOp=is_async))
            )
            if work is not None:
                work.wait()
                assert bool((big == job.size).all())
        assert torch.equal(*results), (number, kind, dtype, op, shape, place, is_async)
        if calls.random() < 0.1:
            for pg in (plain, mixed):
                pg.barrier(options("Barrier")).wait()
        if calls.random() < 0.1:
            time.sleep(own.random() * 0.003)
    assert announced[0] == announced[1]
    assert len(announced[0]) >= 300
    assert sum(used) > 50


def spy(pg: Any) -> list[bool]:
    """Return a list that gets an entry at each use of the prepared path."""
    used, find = [], pg._prepared_calls.find

    def noted(*args: Any) -> Any:
        found = find(*args)
        if found is not None:
            used.append(True)
        return found

    pg._prepared_calls.find = noted
    return used


@on_ranks(2)
def test_it_is_used_for_what_it_can_do(job: Job) -> None:
    """Other calls use the engine, and have the right result too."""
    pg = bare_group(job, "paths", job.rank, job.size, 30.0)
    used = spy(pg)

    def check(prepared: bool, tensor: torch.Tensor, expected: float = job.size, **fields: Any) -> None:
        used.clear()
        all_reduce(pg, tensor, **fields)
        assert bool((tensor.detach().resolve_neg().to_dense() == expected).all())
        assert bool(used) == prepared

    # The first call of a shape and an operation uses the engine; more than one chunk always does.
    for numel, second in ((8, True), (1 << 20, True), ((1 << 20) + 1, False), (0, False), (1, True)):
        check(False, torch.ones(numel))
        check(second, torch.ones(numel))
    check(False, torch.ones(4, 2))
    check(True, torch.ones(4, 2))
    check(False, torch.ones(4, 2), 1, op="AVG")
    check(True, torch.ones(4, 2), 1, op="AVG")
    leaf = torch.ones(4, 2, requires_grad=True)
    check(True, leaf)
    assert leaf._version == 0
    check(True, torch.nn.Parameter(torch.ones(4, 2)))
    check(True, torch.ones(9, 2)[5:])
    with torch.autocast("cpu", torch.bfloat16):
        check(True, torch.ones(4, 2))
    inference, normal = torch.ones(4, 2), torch.ones(4, 2)
    with torch.inference_mode():
        inference = torch.ones(4, 2)
        check(True, torch.ones(4, 2))
        check(True, torch.ones(1 << 16)[-8:].view(4, 2))
        check(True, normal)
    check(True, inference)
    check(True, normal.fill_(1))
    negative = torch.complex(torch.zeros(1), -torch.ones(1)).conj().imag
    assert (negative.is_neg(), negative.is_contiguous()) == (True, True)
    for tensor in (negative, torch.ones(2, 4).t(), torch.ones(4, 2).to_sparse()):
        check(False, tensor)
    check(True, torch.ones(4, 2), asyncOp=True)
    with torch.profiler.profile():
        check(False, torch.ones(4, 2))
    with BaseTorchDispatchMode():  # changes nothing
        check(False, torch.ones(4, 2))
    used.clear()
    for _ in range(2):
        scaled = options("Allreduce", reduceOp=dist._make_nccl_premul_sum(2.0))
        pg.allreduce([torch.ones(4, 2)], scaled).wait()
    assert not used

    # No address: a tensor of zeros only, or one in a transform of torch.func.
    def is_prepared(tensor: torch.Tensor) -> bool:
        return pg._prepared_calls.find(pg._host, "all_reduce", tensor, tensor, dist.ReduceOp.SUM) is not None

    def loss(tensor: torch.Tensor) -> torch.Tensor:
        assert not is_prepared(tensor)
        return tensor.sum()

    assert is_prepared(torch.ones(4, 2))
    assert not is_prepared(torch._efficientzerotensor(4, 2))
    torch.func.grad(loss)(torch.ones(4, 2))


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1 << 16])
@on_ranks(3, env=lambda rank, chunk_bytes: {knobs.CHUNK_BYTES_ENV_VAR: str(chunk_bytes)})
def test_up_to_192_kib_are_reduced_in_one_pass(job: Job, chunk_bytes: int) -> None:
    """In one chunk and in several; the result is the same as in two passes."""
    one = bare_group(job, "one", job.rank, job.size, 30.0)
    os.environ[knobs.ONE_PASS_BYTES_ENV_VAR] = "0"
    two = bare_group(job, "two", job.rank, job.size, 30.0)
    used, of_one, of_two = spy(one), announcements(one), announcements(two)
    for dtype, largest in (torch.float32, 49_152), (torch.bfloat16, 98_304):
        for numel in (largest, largest + 1):
            for number in (1, 2):  # the first call of a size uses the engine
                for noted in (used, of_one, of_two):
                    noted.clear()
                tensor = data(dtype, (numel,), 10 * number + job.rank)
                assert torch.equal(*(all_reduce(pg, tensor.clone()).view(torch.uint8) for pg in (one, two)))
                folds = [any(map(has_folded, announced)) for announced in (of_one, of_two)]
                is_one_chunk = tensor.nbytes <= chunk_bytes
                assert (bool(used), folds) == (is_one_chunk and number == 2, [numel > largest, True])


@on_ranks(2)
def test_the_views_of_outputs_are_of_the_tensors_of_the_call(job: Job) -> None:
    """Only some are kept; a new tensor may be at the address of an old one."""
    pg = bare_group(job, "addresses", job.rank, job.size, 30.0)
    all_reduce(pg, torch.ones(64, 2))
    kept = [torch.empty(64, 2) for _ in range(50)]
    for number in [*range(50)] * 2 + [0, 0, 1]:
        kept[number].fill_(number + job.rank)
        assert bool((all_reduce(pg, kept[number]) == 2 * number + 1).all())
        # The memory of a freed tensor has a new owner, with other contents.
        freed = torch.full((64, 2), float(job.rank))
        assert bool((all_reduce(pg, freed) == 1).all())
        del freed
        other = torch.full((64, 2), 7.0)
        all_reduce(pg, torch.full((64, 2), float(job.rank)))
        assert bool((other == 7).all())
    (outputs,) = [found for found in gc.get_objects() if isinstance(found, _Outputs) and len(found)]
    assert 1 <= len(outputs) <= 16


def with_prepared_call(job: Job, timeout_s: float = 30.0) -> tuple[Any, list[bool]]:
    """Return a group in which an all_reduce of four numbers is prepared, and a list that gets an entry at each use of the path."""
    pg = bare_group(job, "prepared", job.rank, job.size, timeout_s)
    for _ in range(2):
        all_reduce(pg, torch.ones(4))
    return pg, spy(pg)


@on_ranks(2)
def test_wrong_tensors_are_refused_each_time(job: Job) -> None:
    """By the general path, also after calls of these shapes that are right."""
    pg, opts = bare_group(job, "wrong", job.rank, job.size, 30.0), options("ReduceScatter")
    four, eight = torch.ones(4), torch.ones(8)
    for _ in range(3):
        pg._reduce_scatter_base(four, eight, opts).wait()
        pg._allgather_base(eight, four, options("Allgather")).wait()
        for output, source in ((four, four), (four, four.clone()), (four, eight.int()), (eight, four)):
            with pytest.raises(ValueError, match="expects"):
                pg._reduce_scatter_base(output, source, opts)
        for output, source in ((four, four), (eight, four.int()), (four, eight)):
            with pytest.raises(ValueError, match="expects"):
                pg._allgather_base(output, source, options("Allgather"))


@on_ranks(2)
def test_the_work_of_a_prepared_call(job: Job) -> None:
    """It has finished, from Python and from torch's C++."""
    pg, used = with_prepared_call(job)
    for start in (pg.allreduce, partial(dist.ProcessGroup.allreduce, pg)):
        tensor, calls, before = torch.ones(4), [], pg._get_sequence_number_for_group()
        work = start([tensor], options("Allreduce"))
        (value,) = work.get_future().wait()
        work.get_future().then(lambda future, calls=calls: calls.append(future.value()))
        assert value.data_ptr() == tensor.data_ptr()
        if start is pg.allreduce:
            assert work.result()[0] is tensor
            assert (work.is_completed(), work.is_success()) == (True, True)
        assert (work.wait(), work.wait(timedelta(seconds=1)), len(calls)) == (True, True, 1)
        assert work.exception() is None
        assert tensor.tolist() == [2.0] * 4
        assert pg._get_sequence_number_for_group() == before + 1
    assert len(used) == 2


@on_ranks(2)
def test_what_was_prepared_ends_with_the_group(job: Job) -> None:
    """Closed between the choice of the path and the call, as another thread may do, the call does not run; its memory is freed."""
    pg, _ = with_prepared_call(job)
    tensor = torch.ones(4)
    call, *addresses = pg._prepared_calls.find(pg._host, "all_reduce", tensor, tensor, dist.ReduceOp.SUM)
    pg.barrier(options("Barrier")).wait()
    pg.shutdown()
    assert not call.run(*addresses, options("Allreduce"))
    assert not call.start(*addresses, options("Allreduce"), pytest.fail)
    calls = pg._prepared_calls._kinds
    del pg, call, _
    gc.collect()
    assert calls == {}
    assert mapped_arenas() == []


@on_ranks(2, env={**SMALL_CHUNKS, knobs.SLOTS_ENV_VAR: "2"})
def test_a_rank_without_a_free_slot_waits(job: Job) -> None:
    """Rank 1 reads a broadcast late; rank 0's next calls overwrite no slot that rank 1 has not read."""
    pg, used = with_prepared_call(job)
    if job.rank == 1:
        pg._local.engine.observer = lambda action, chunk: time.sleep(0.5 if action is Action.TAKE else 0)
    tensor = torch.full((2 * CHUNK_BYTES // 4,), 7.0 if job.rank == 0 else 0.0)
    pg.broadcast([tensor], options("Broadcast")).wait()
    assert bool((tensor == 7).all())
    sums = [float(all_reduce(pg, torch.full((4,), float(job.rank + number))).sum()) for number in range(3)]
    assert (len(used), sums) == (3, [4.0, 12.0, 20.0])


# Faults of a rank while the others are in a prepared call, and between its two passes: the error, and a part of its text.
FAULTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "killed": (lambda pg: strike("kill"), "PeerLostError", " (pid "),
    "stopped": (lambda pg: strike("stop"), "CollectiveTimeoutError", ", stopped) did not reach all_reduce"),
    "late": (lambda pg: time.sleep(3), "CollectiveTimeoutError", "did not reach all_reduce(float32["),
    "aborted": (lambda pg: pg.abort(), "GroupPoisonedError", " aborted the process group"),
    "left": (lambda pg: pg.shutdown(), "PeerLostError", " shut its process group down"),
    "another call": (lambda pg: all_reduce(pg, torch.ones(5)), "CollectiveMismatchError", "float32[5]"),
    "failed": (lambda pg: 1 / 0, "GroupPoisonedError", "ZeroDivisionError"),
}


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 2) for name in FAULTS if name != "failed"), *((name, 3) for name in ("killed", "stopped", "failed"))],
)
def test_a_fault_of_a_peer_is_reported(name: str, size: int) -> None:
    """As in a call of the engine, and the group cannot be used afterwards; with three ranks, between the passes."""
    _, error_type, text = FAULTS[name]
    for first, second, num_used in values(run_ranks(fault, size, name, limit_s=60, needed=size - 1)[: size - 1]):
        # With three, a rank may learn of the fault from the other one.
        assert first[0] == error_type or (size == 3 and first[0] == "GroupPoisonedError"), first
        assert f"rank {size - 1}" in first[1] or name == "failed"
        assert text in first[1]
        assert second[0] in ("GroupPoisonedError", "GroupClosedError"), second
        assert num_used >= 2


def fault(job: Job, name: str) -> Any:
    """The last rank has a fault; return the errors of the others' call and of their next one."""
    pg, numel, victim = bare_group(job, "faults", job.rank, job.size, 1.0), 4 if job.size == 2 else 65_536, job.size - 1
    used, publish = spy(pg), pg._local.engine.waiter.publish

    def after_fold(*counts: int) -> None:
        if job.rank == victim and len(used) == 2 and has_folded((0, *counts)):
            FAULTS[name][0](pg)
        publish(*counts)

    pg._local.engine.waiter.publish = after_fold
    for other in (numel, 5, numel, 5)[:: 1 if job.size == 2 else 2]:
        assert bool((all_reduce(pg, torch.ones(other)) == job.size).all())
    if job.size == 2 and job.rank == victim:
        with contextlib.suppress(RuntimeError):
            FAULTS[name][0](pg)
        return None
    errors = [error_of(lambda: all_reduce(pg, torch.ones(numel))) for _ in range(2)]
    return *errors, len(used)


@pytest.mark.parametrize("is_async", [False, True])
@on_ranks(2)
def test_an_interrupted_call_breaks_the_group(job: Job, is_async: bool) -> None:
    """A signal handler raises in rank 0 while it waits in a prepared call, so it is out of step; rank 1 then makes the same call."""
    pg, _ = with_prepared_call(job)
    store = job.store()
    if job.rank == 0:
        waiter = pg._local.engine.waiter
        begun, wait = waiter.num_published, waiter.wait

        def interrupt() -> None:
            while waiter.num_published == begun:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        # A shell's background jobs ignore this signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt, daemon=True).start()
        # The poll of an asynchronous call, too short for a signal, as a wait.
        waiter.poll = lambda *args: wait(*args, time.monotonic() + 30, "poll")
        with pytest.raises(KeyboardInterrupt):
            all_reduce(pg, torch.ones(4), asyncOp=is_async)
        store.set("interrupted", "")
    store.wait(["interrupted"])
    with pytest.raises(GroupPoisonedError, match="KeyboardInterrupt"):
        all_reduce(pg, torch.ones(4))


@pytest.mark.parametrize("of_call", [True, False])
@on_ranks(2)
def test_the_time_limit_of_a_call_and_of_the_group(job: Job, of_call: bool) -> None:
    """Both hold."""
    pg, used = with_prepared_call(job)
    if not of_call:
        pg.set_timeout(timedelta(seconds=1))
    if job.rank == 0:
        limit = {"timeout": timedelta(seconds=1)} if of_call else {}
        error_type, _, seconds = error_of(lambda: all_reduce(pg, torch.ones(4), **limit))
        assert (error_type, used) == ("CollectiveTimeoutError", [True])
        assert 0.9 < seconds < 10
        job.store().set("over", "")
    job.store().wait(["over"])


@on_ranks(3)
def test_one_time_limit_for_all_peers(job: Job) -> None:
    """Each peer comes within the limit after the one before; the last one is too late for the first rank's call."""
    pg, _ = with_prepared_call(job, 2.0)
    time.sleep(1.5 * job.rank)
    assert error_of(lambda: all_reduce(pg, torch.ones(4)))[0] == (
        "CollectiveTimeoutError" if not job.rank else "GroupPoisonedError"
    )


@on_ranks(2)
def test_an_asynchronous_call_does_not_wait_for_a_late_rank(job: Job) -> None:
    """Its part is announced at once, and its rest is the next call of the queue."""
    pg, used = with_prepared_call(job, 30.0)
    store, tensors = job.store(), [torch.full((4,), float(job.rank + number)) for number in range(3)]
    if job.rank == 1:
        store.wait(["begun"])
    works = [pg.allreduce([tensor], options("Allreduce", asyncOp=True)) for tensor in tensors]
    if job.rank == 0:
        assert [work.is_completed() for work in works] == [False] * 3
        store.set("begun", "")
    sums = [work.get_future().wait()[0].tolist() for work in reversed(works)]
    assert sums == [[2.0 * number + 1] * 4 for number in (2, 1, 0)]
    assert used


@on_ranks(2)
def test_the_clock_of_an_asynchronous_call_runs_from_the_call_on(job: Job) -> None:
    """And not from its rest, which the queue may run much later."""
    pg, store, tensor = bare_group(job, "clock", job.rank, 2, 30.0), job.store(), torch.ones(4)
    deadlines, rests = [], []
    all_reduce(pg, tensor)
    if job.rank == 1:
        store.wait(["waits"])
        all_reduce(pg, tensor)
        return
    wait = pg._local.engine.waiter.wait
    pg._local.engine.waiter.wait = lambda *args: (deadlines.append(args[3]), store.set("waits", ""), wait(*args))
    call, *addresses = pg._prepared_calls.find(pg._host, "all_reduce", tensor, tensor, dist.ReduceOp.SUM)
    call.start(*addresses, options("Allreduce", asyncOp=True), rests.append)
    latest = time.monotonic() + 30.0
    time.sleep(0.1)
    rests[0]()
    assert deadlines[0] <= latest


@on_ranks(2)
def test_only_some_shapes_are_kept(job: Job) -> None:
    """Their views need memory."""
    prepared_calls._MAX_SHAPES = 8
    pg = bare_group(job, "many", job.rank, job.size, 30.0)
    for numel in sorted([*range(1, 40)] * 3):
        assert all_reduce(pg, torch.ones(numel)).sum() == job.size * numel
    assert len(pg._prepared_calls._kinds) <= 8
