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
from ipc_calls import CHUNK_BYTES, SMALL_CHUNKS, bare_group, memfd_count, options
from ipc_fault_runs import error_of
from ipc_harness import Job, run_ranks, values
from torch.utils._python_dispatch import TorchDispatchMode

from ray_fracbackend.ipc import knobs
from ray_fracbackend.ipc.group import small_calls
from ray_fracbackend.ipc.protocol.prepared import _Outputs
from ray_fracbackend.ipc.protocol.schedule import Action

OPS = {
    torch.float32: ("SUM", "AVG", "PRODUCT", "MIN", "MAX"),
    torch.bfloat16: ("SUM", "AVG", "PRODUCT", "MIN", "MAX"),
    torch.int64: ("SUM", "AVG", "MIN", "MAX", "BAND", "BOR", "BXOR"),
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
    """Return a list that gets this rank's announcements, and the chunks for which it chooses a slot or a folded area."""
    waiter, memory, found = pg._local.engine.waiter, pg._local.engine.transport, []
    publish, prepare_put, prepare_fold = waiter.publish, memory.prepare_put, memory.prepare_fold

    def noted_publish(written: int, read: int, done: int) -> None:
        found.append((waiter.num_calls, written, read, done))
        publish(written, read, done)

    def noted_put(chunk: int, read: int, readers: Any) -> None:
        assert chunk - memory.num_slots <= read < chunk
        found.append((chunk, list(readers)))
        prepare_put(chunk, read, readers)

    def noted_fold(chunk: int, done: int) -> None:
        assert chunk - memory.num_slots <= done < chunk
        found.append(("fold", chunk))
        prepare_fold(chunk, done)

    waiter.publish, memory.prepare_put, memory.prepare_fold = noted_publish, noted_put, noted_fold
    return found


def both_paths(job: Job, seed: int) -> list[bool]:
    """Run the same random calls in two groups; in one of them each rank chooses its path at random for each call."""
    plain, mixed = (bare_group(job, name, job.rank, job.size, 30.0) for name in ("plain", "mixed"))
    announced = [announcements(pg) for pg in (plain, mixed)]
    plain._small_calls.all_reduce = lambda host, tensor, opts: None
    prepared, own = mixed._small_calls.all_reduce, random.Random(1000 * seed + job.rank)
    used = []

    def sometimes(host: Any, tensor: torch.Tensor, opts: Any) -> Any:
        found = prepared(host, tensor, opts) if own.random() < 0.7 else None
        used.append(found is not None)
        return found

    mixed._small_calls.all_reduce = sometimes
    calls, same = random.Random(seed), []
    shapes = [(), (1,), (3, 5), (1024,), (4096,), (0,), (20_000,), (41, 1001), (100_003,)]
    for number in range(300):
        dtype = calls.choice(list(OPS))
        op, shape = calls.choice(OPS[dtype]), calls.choice(shapes)
        tensor = data(dtype, shape, 1000 * number + job.rank)
        is_async, big_numel, results = calls.random() < 0.2, calls.choice((30_000, 200_000)), []
        for pg in (plain, mixed):
            big = torch.ones(big_numel)
            work = pg.allreduce([big], options("Allreduce", asyncOp=True)) if is_async else None
            results.append(all_reduce(pg, tensor.clone(), op))
            if work is not None:
                work.wait()
                assert bool((big == job.size).all())
        same.append(
            torch.equal(results[0].view(torch.uint8), results[1].view(torch.uint8))
            if shape != ()
            else bool((results[0] == results[1]).all())
        )
        if calls.random() < 0.1:
            for pg in (plain, mixed):
                pg.barrier(options("Barrier")).wait()
        if calls.random() < 0.1:
            time.sleep(own.random() * 0.003)
    assert announced[0] == announced[1]
    assert len(announced[0]) >= len(same)
    assert sum(used) > 50
    return same


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("size", "slots"),
    [(2, 4), (3, 2), *(pytest.param(*sizes, marks=FULL) for sizes in ((2, 2), (3, 4), (4, 2), (4, 4)))],
)
def test_ranks_on_either_path_have_bitwise_the_results_of_the_engine(size: int, slots: int) -> None:
    """Whichever path each rank uses for a call; with three or more ranks also in two passes."""
    env = {knobs.SLOTS_ENV_VAR: str(slots)}
    for same in values(run_ranks(both_paths, size, 7, limit_s=120, env=env)):
        assert same == [True] * 300


class Nothing(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def paths(job: Job) -> dict[str, tuple[bool, bool]]:
    """Return for each kind of call whether its result is right, and whether it used the prepared path."""
    pg = bare_group(job, "paths", job.rank, job.size, 30.0)
    used = spy(pg)
    found = {}

    def check(name: str, tensor: torch.Tensor, expected: float = job.size, **fields: Any) -> None:
        used.clear()
        all_reduce(pg, tensor, **fields)
        found[name] = bool((tensor.detach().resolve_neg().to_dense() == expected).all()), bool(used)

    check("first", torch.ones(4, 2))
    check("second", torch.ones(4, 2))
    for numel, name in ((8, "another shape"), (262_144, "one chunk"), (262_145, "two chunks")):
        check(f"{name}, first", torch.ones(numel))
        check(name, torch.ones(numel))
    leaf = torch.ones(4, 2, requires_grad=True)
    check("a leaf", leaf)
    assert leaf._version == 0
    check("asynchronous", torch.ones(4, 2), asyncOp=True)
    check("a parameter", torch.nn.Parameter(torch.ones(4, 2)))
    check("a slice", torch.ones(9, 2)[5:])
    with torch.autocast("cpu", torch.bfloat16):
        check("in autocast", torch.ones(4, 2))
    check("empty, first", torch.ones(0))
    check("empty", torch.ones(0))
    check("the first AVG", torch.ones(4, 2), 1, op="AVG")
    check("AVG", torch.ones(4, 2), 1, op="AVG")
    check("transposed", torch.ones(2, 4).t())
    check("sparse", torch.ones(4, 2).to_sparse())
    with torch.inference_mode():
        inference = torch.ones(4, 2)
        check("in inference mode", torch.ones(4, 2))
        check("in inference mode, at a new address", torch.ones(1 << 16)[-8:].view(4, 2))
    assert inference.is_inference()
    check("an inference tensor", inference)
    normal = torch.ones(4, 2)
    with torch.inference_mode():
        check("in inference mode, a normal tensor", normal)
    normal.fill_(1)
    check("the same afterwards", normal)
    negative = torch.complex(torch.zeros(1), -torch.ones(1)).conj().imag
    assert negative.is_neg()
    assert negative.is_contiguous()
    check("one element, first", torch.ones(1))
    check("one element", torch.ones(1))
    check("negated", negative)
    with torch.profiler.profile():
        check("in a profile", torch.ones(4, 2))
    with Nothing():
        check("in a dispatch mode", torch.ones(4, 2))
    used.clear()
    pg.allreduce([torch.ones(4, 2)], options("Allreduce", reduceOp=dist._make_nccl_premul_sum(2.0))).wait()
    pg.allreduce([torch.ones(4, 2)], options("Allreduce", reduceOp=dist._make_nccl_premul_sum(2.0))).wait()
    found["a scaled sum"] = True, bool(used)
    return found


def spy(pg: Any) -> list[bool]:
    """Return a list that gets an entry at each use of the prepared path."""
    used, find = [], pg._small_calls.all_reduce

    def noted(*args: Any) -> Any:
        found = find(*args)
        if found is not None:
            used.append(True)
        return found

    pg._small_calls.all_reduce = noted
    return used


def test_it_is_used_for_what_it_can_do() -> None:
    """Other calls use the engine, and have the right result too."""
    prepared = {
        "second",
        "another shape",
        "one chunk",
        "a leaf",
        "a parameter",
        "a slice",
        "in autocast",
        "AVG",
        "in inference mode",
        "in inference mode, at a new address",
        "an inference tensor",
        "in inference mode, a normal tensor",
        "the same afterwards",
        "one element",
    }
    for found in values(run_ranks(paths, 2, limit_s=120)):
        assert [name for name, (is_right, _) in found.items() if not is_right] == []
        assert {name for name, (_, is_used) in found.items() if is_used} == prepared


def folds(pg: Any) -> list[int]:
    """Return a list that gets each chunk that this rank reduces in two passes."""
    memory, found = pg._local.engine.transport, []
    prepare_fold = memory.prepare_fold

    def noted(chunk: int, done: int) -> None:
        found.append(chunk)
        prepare_fold(chunk, done)

    memory.prepare_fold = noted
    return found


def passes(job: Job) -> list[tuple[bool, ...]]:
    """For the largest size in one pass and the next: whether each call used the path, two passes, and has their result."""
    one = bare_group(job, "one", job.rank, job.size, 30.0)
    os.environ[knobs.ONE_PASS_BYTES_ENV_VAR] = "0"
    two = bare_group(job, "two", job.rank, job.size, 30.0)
    found, used, folded, always_folded = [], spy(one), folds(one), folds(two)
    for dtype, largest in (torch.float32, 32_768), (torch.bfloat16, 65_536):
        for numel in (largest, largest + 1):
            for seed in (1, 2):  # the first call of a size uses the engine
                for noted in (used, folded, always_folded):
                    noted.clear()
                tensor = data(dtype, (numel,), 10 * seed + job.rank)
                results = [all_reduce(pg, tensor.clone()).view(torch.uint8) for pg in (one, two)]
                assert always_folded
                found.append((bool(used), bool(folded), torch.equal(*results)))
    return found


@pytest.mark.parametrize(("chunk_bytes", "prepared"), [(1 << 20, True), (1 << 16, False)])
def test_up_to_128_kib_are_reduced_in_one_pass(chunk_bytes: int, prepared: bool) -> None:
    """With three ranks too, in one chunk and in several; the result is the same as in two passes."""
    env = {knobs.CHUNK_BYTES_ENV_VAR: str(chunk_bytes)}
    expected = [(False, False, True), (prepared, False, True), (False, True, True), (prepared, True, True)]
    assert values(run_ranks(passes, 3, limit_s=60, env=env)) == [expected * 2] * 3


def addresses(job: Job) -> tuple[bool, int]:
    """Return whether calls on more tensors than a call keeps views of are right, and the largest number of views."""
    pg = bare_group(job, "addresses", job.rank, job.size, 30.0)
    all_reduce(pg, torch.ones(64, 2))
    kept, right = [torch.empty(64, 2) for _ in range(50)], []
    for number in [*range(50)] * 2 + [0, 0, 1]:
        kept[number].fill_(number + job.rank)
        right.append(bool((all_reduce(pg, kept[number]) == 2 * number + 1).all()))
        # The memory of a freed tensor has a new owner, with other contents.
        freed = torch.full((64, 2), float(job.rank))
        right.append(bool((all_reduce(pg, freed) == 1).all()))
        del freed
        other = torch.full((64, 2), 7.0)
        all_reduce(pg, torch.full((64, 2), float(job.rank)))
        right.append(bool((other == 7).all()))
    ((_, call),) = pg._small_calls._kinds[torch.float32, torch.Size((64, 2))]
    (finish,) = [
        cell.cell_contents for cell in call.__closure__ if getattr(cell.cell_contents, "__name__", "") == "reduce_pair"
    ]
    (outputs,) = [cell.cell_contents for cell in finish.__closure__ if isinstance(cell.cell_contents, _Outputs)]
    return all(right), len(outputs)


def test_the_views_of_outputs_are_of_the_tensors_of_the_call() -> None:
    """Only some are kept; a new tensor may be at the address of an old one."""
    for right, num_views in values(run_ranks(addresses, 2, limit_s=60)):
        assert right
        assert 1 <= num_views <= 16


def works(job: Job) -> list[Any]:
    """Return what the Work of a prepared call says, from Python and from torch's C++."""
    pg = bare_group(job, "works", job.rank, job.size, 30.0)
    all_reduce(pg, torch.ones(4))
    used, found = spy(pg), []
    for start in (pg.allreduce, partial(dist.ProcessGroup.allreduce, pg)):
        tensor, calls = torch.ones(4), []
        before = pg._get_sequence_number_for_group()
        work = start([tensor], options("Allreduce"))
        (value,) = work.get_future().wait()
        work.get_future().then(lambda future, calls=calls: calls.append(future.value()))
        assert value.data_ptr() == tensor.data_ptr()
        assert start is not pg.allreduce or work.result()[0] is tensor
        assert start is not pg.allreduce or (work.is_completed(), work.is_success()) == (True, True)
        found.append((work.wait(), work.wait(timedelta(seconds=1)), len(calls)))
        assert work.exception() is None
        found.append((tensor.tolist(), pg._get_sequence_number_for_group() - before))
    return [len(used), *found]


def test_the_work_of_a_prepared_call() -> None:
    """It has finished."""
    once = [(True, True, 1), ([2.0] * 4, 1)]
    assert values(run_ranks(works, 2, limit_s=60)) == [[2, *once, *once]] * 2


def without_memory(job: Job) -> list[bool]:
    """Return whether tensors would use the prepared path."""
    pg = bare_group(job, "without memory", job.rank, job.size, 30.0)
    for _ in range(2):
        all_reduce(pg, torch.ones(4))
    found = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(pg._small_calls.all_reduce(pg._host, tensor, options("Allreduce")) is not None)
        return tensor.sum()

    look(torch.ones(4))
    look(torch._efficientzerotensor(4))
    torch.func.grad(look)(torch.ones(4))
    return found


def test_a_tensor_without_memory_does_not_use_it() -> None:
    """It has no address: a tensor of zeros only, or one in a transform of torch.func."""
    assert values(run_ranks(without_memory, 2, limit_s=60)) == [[True, False, False]] * 2


def closed_between(job: Job) -> bool:
    """Close the group, as another thread may do, between the choice of the path and the call; return whether it ran."""
    pg = bare_group(job, "closed", job.rank, job.size, 30.0)
    for _ in range(2):
        all_reduce(pg, torch.ones(4))
    tensor = torch.ones(4)
    run, address = pg._small_calls.all_reduce(pg._host, tensor, options("Allreduce"))
    pg.barrier(options("Barrier")).wait()
    pg.shutdown()
    return bool(run(address, options("Allreduce")))


def test_a_closed_group_does_not_use_it() -> None:
    """Its memory may be freed."""
    assert values(run_ranks(closed_between, 2, limit_s=60)) == [False, False]


def behind(job: Job) -> list[float]:
    """Rank 1 reads a broadcast late; return the sums of rank 0's next calls, for which it has no free slot yet."""
    pg = bare_group(job, "behind", job.rank, job.size, 30.0)
    for _ in range(2):
        all_reduce(pg, torch.ones(4))
    used = spy(pg)
    if job.rank == 1:
        pg._local.engine.observer = lambda action, chunk: time.sleep(0.5 if action is Action.TAKE else 0)
    tensor = torch.full((2 * CHUNK_BYTES // 4,), 7.0 if job.rank == 0 else 0.0)
    pg.broadcast([tensor], options("Broadcast")).wait()
    assert bool((tensor == 7).all())
    sums = [float(all_reduce(pg, torch.full((4,), float(job.rank + number))).sum()) for number in range(3)]
    assert len(used) == 3
    return sums


def test_a_rank_without_a_free_slot_waits() -> None:
    """It overwrites no slot that another rank has not read."""
    env = {**SMALL_CHUNKS, knobs.SLOTS_ENV_VAR: "2"}
    assert values(run_ranks(behind, 2, limit_s=60, env=env)) == [[4.0, 12.0, 20.0]] * 2


def mismatch(pg: Any) -> None:
    pg.allreduce([torch.ones(5)], options("Allreduce")).wait()


FAULTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "killed": (lambda pg: os.kill(os.getpid(), signal.SIGKILL), "PeerLostError", "rank 1 (pid "),
    "stopped": (
        lambda pg: os.kill(os.getpid(), signal.SIGSTOP),
        "CollectiveTimeoutError",
        ", stopped) did not reach all_reduce",
    ),
    "late": (lambda pg: time.sleep(3), "CollectiveTimeoutError", "did not reach all_reduce(float32[4], SUM)"),
    "aborted": (lambda pg: pg.abort(), "GroupPoisonedError", "rank 1 aborted the process group"),
    "left": (lambda pg: pg.shutdown(), "PeerLostError", "rank 1 shut its process group down"),
    "another call": (mismatch, "CollectiveMismatchError", "while rank 1 called all_reduce(float32[5], SUM)"),
}


def fault(job: Job, name: str) -> Any:
    """Rank 1 has a fault while rank 0 is in a prepared call; return the errors of rank 0's call and of its next one."""
    pg = bare_group(job, "faults", job.rank, job.size, 1.0)
    used = spy(pg)
    for shape in (4, 4, 5, 5):
        all_reduce(pg, torch.ones(shape))
    if job.rank == 1:
        with contextlib.suppress(RuntimeError):
            FAULTS[name][0](pg)
        return None
    errors = [error_of(lambda: all_reduce(pg, torch.ones(4))) for _ in range(2)]
    return errors, len(used)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_peer_is_reported(name: str) -> None:
    """As in a call of the engine, and the group cannot be used afterwards."""
    _, error_type, text = FAULTS[name]
    outcome = run_ranks(fault, 2, name, limit_s=60, needed=1)[:1]
    ((first, second), num_used) = values(outcome)[0]
    assert (first[0], text in first[1]) == (error_type, True), first
    assert second[0] in ("GroupPoisonedError", "GroupClosedError"), second
    assert num_used >= 3


BETWEEN: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "killed": (FAULTS["killed"][0], "PeerLostError", "rank 2 (pid "),
    "stopped": (
        FAULTS["stopped"][0],
        "CollectiveTimeoutError",
        ", stopped) did not reach all_reduce(float32[65536], SUM)",
    ),
    "failed": (
        lambda pg: 1 / 0,
        "GroupPoisonedError",
        "ZeroDivisionError: division by zero in all_reduce(float32[65536]",
    ),
}


def fault_between(job: Job, name: str) -> Any:
    """Rank 2 has a fault between the two passes of a prepared call; return the errors of this call and of the next."""
    pg = bare_group(job, "between", job.rank, job.size, 1.0)
    used, memory, prepare_fold = spy(pg), pg._local.engine.transport, pg._local.engine.transport.prepare_fold

    def fold(chunk: int, done: int) -> None:
        if job.rank == 2 and len(used) == 2:
            BETWEEN[name][0](pg)
        prepare_fold(chunk, done)

    memory.prepare_fold = fold
    for _ in range(2):
        assert bool((all_reduce(pg, torch.ones(65_536)) == job.size).all())
    errors = [error_of(lambda: all_reduce(pg, torch.ones(65_536))) for _ in range(2)]
    assert len(used) >= 2
    return errors


@pytest.mark.parametrize("name", BETWEEN)
def test_a_fault_between_the_passes_is_reported(name: str) -> None:
    """To all ranks that wait for the folded share."""
    _, error_type, text = BETWEEN[name]
    outcome = run_ranks(fault_between, 3, name, limit_s=60, needed=2)
    for first, second in values(outcome[:2]):
        # A rank may learn of the fault from the other one.
        assert (first[0] in (error_type, "GroupPoisonedError"), text in first[1]) == (True, True), first
        assert second[0] in ("GroupPoisonedError", "GroupClosedError"), second


def interrupted(job: Job) -> Any:
    """A signal handler raises in rank 0 while it waits in a prepared call; rank 1 then makes the same call."""
    pg = bare_group(job, "interrupted", job.rank, job.size, 30.0)
    for _ in range(2):
        all_reduce(pg, torch.ones(4))
    store = job.store()
    if job.rank == 0:
        waiter = pg._local.engine.waiter
        begun = waiter.num_published

        def interrupt() -> None:
            while waiter.num_published == begun:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        # A shell's background jobs ignore this signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            all_reduce(pg, torch.ones(4))
        store.set("interrupted", "")
    store.wait(["interrupted"])
    return error_of(lambda: all_reduce(pg, torch.ones(4)))


def test_an_interrupted_call_breaks_the_group() -> None:
    """Rank 0 is out of step."""
    for error_type, text, _ in values(run_ranks(interrupted, 2, limit_s=60)):
        assert (error_type, "KeyboardInterrupt" in text) == ("GroupPoisonedError", True)


def timeouts(job: Job) -> list[float]:
    """Return the seconds until rank 0's call failed, with a time limit of the call, and of the group."""
    seconds = []
    for name, limit in (("call", {"timeout": timedelta(seconds=1)}), ("group", {})):
        pg = bare_group(job, name, job.rank, job.size, 20.0)
        for _ in range(2):
            all_reduce(pg, torch.ones(4))
        if name == "group":
            pg.set_timeout(timedelta(seconds=1))
        if job.rank == 0:
            used = spy(pg)
            error_type, _, taken = error_of(lambda pg=pg, limit=limit: all_reduce(pg, torch.ones(4), **limit))
            assert (error_type, used) == ("CollectiveTimeoutError", [True])
            seconds.append(taken)
        job.store().set(f"{name} {job.rank}", "")
        job.store().wait([f"{name} 0"])
    return seconds


def test_the_time_limit_of_a_call_and_of_the_group() -> None:
    """Both hold."""
    assert all(0.9 < taken < 10 for taken in values(run_ranks(timeouts, 2, limit_s=60))[0])


def in_a_child(job: Job) -> tuple[str, str, float]:
    """Return the error of a prepared call in a forked child."""
    pg = bare_group(job, "child", job.rank, job.size, 30.0)
    for _ in range(2):
        all_reduce(pg, torch.ones(4))
    answer: tuple[str, str, float] = ("", "", 0.0)
    if job.rank == 0:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, error_of(lambda: all_reduce(pg, torch.ones(4)))[0].encode())
            os._exit(0)
        os.waitpid(child, 0)
        answer = (os.read(read, 100).decode(), "", 0.0)
    all_reduce(pg, torch.ones(4))
    return answer


def test_a_forked_child_raises() -> None:
    """The parent's group goes on."""
    assert values(run_ranks(in_a_child, 2, limit_s=60))[0][0] == "GroupClosedError"


def memory_left(job: Job) -> int:
    """Return the number of mappings after a group with prepared calls was shut down and dropped."""
    pg = bare_group(job, "memory", job.rank, job.size, 30.0)
    for _ in range(3):
        all_reduce(pg, torch.ones(4))
    pg.barrier(options("Barrier")).wait()
    pg.shutdown()
    calls = pg._small_calls._kinds
    del pg
    gc.collect()
    assert calls == {}
    return memfd_count()


def test_its_memory_is_freed() -> None:
    """What was prepared does not outlive the group."""
    assert values(run_ranks(memory_left, 2, limit_s=60)) == [0, 0]


def many_shapes(job: Job) -> int:
    """Return the number of kept shapes after calls of more shapes."""
    small_calls._MAX_SHAPES = 8
    pg = bare_group(job, "many", job.rank, job.size, 30.0)
    for numel in sorted([*range(1, 40)] * 3):
        assert all_reduce(pg, torch.ones(numel)).sum() == job.size * numel
    return len(pg._small_calls._kinds)


def test_only_some_shapes_are_kept() -> None:
    """Their views need memory."""
    assert max(values(run_ranks(many_shapes, 2, limit_s=60))) <= 8
