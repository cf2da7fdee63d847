"""verify_process_group with real processes, without Ray."""

import functools
import re
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from ray_fracbackend import (
    SharedDeviceError,
    VerificationError,
    VerificationResult,
    verify_process_group,
)
from ray_fracbackend.decide.error_texts import is_invalid_usage
from ray_fracbackend.verify import collectives as verify
from ray_fracbackend.verify import failure as verify_failure
from tests.processes import run_processes
from tests.unit.test_error_texts import DUPLICATE, torch_text
from tests.unit.test_missing_cuda import RELEASES, recorded


def init(rank, world_size, port):
    url, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size, timeout=timeout)


def verify_world(rank, world_size, port):
    init(rank, world_size, port)
    return [verify_process_group() for _ in range(2)][1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_world_sizes(world_size):
    """A working group of any size passes, twice in a row, and all ranks have the same measurements."""
    results = run_processes(verify_world, world_size)
    assert all(isinstance(result, VerificationResult) for result in results), results
    found = {(each.world_size, each.backend, each.device, len(each.rank_seconds)) for each in results}
    assert found == {(world_size, "gloo", "cpu", world_size)}
    assert len({(r.latency_s, r.bandwidth_bytes_per_s, r.rank_seconds) for r in results}) == 1
    assert results[0].latency_s > 0


def in_subgroup(rank, world_size, port):
    """Return the size of a group of ranks 1 and 2 for every form of the call, or the error of the rank that is not in it."""
    init(rank, world_size, port)
    group, found = dist.new_group([1, 2]), []
    for device in (None, "cpu"):
        try:
            found.append(verify_process_group(group, device=device).world_size)
        except ValueError as error:
            found.append(str(error))
    dist.barrier()  # rank 0 hosts the store that the others use
    return found


def test_subgroup():
    """A subgroup is verified only by its ranks, with its own rank numbers."""
    outside, *inside = run_processes(in_subgroup, 3)
    assert inside == [[2, 2], [2, 2]]
    assert ["this rank is not in it" in text for text in outside] == [True, True]


def missing_in_subgroup(rank, world_size, port):
    init(rank, world_size, port)
    group = dist.new_group([1, 2])
    text, ranks = None, None
    if rank == 1:
        try:
            verify_process_group(group, timeout_s=1)
        except VerificationError as error:
            text, ranks = str(error), error.ranks
    dist.barrier()
    return text, ranks


def test_ranks_of_a_subgroup_are_named_as_those_of_the_job():
    """A reader of the error knows only the job's ranks."""
    text, ranks = run_processes(missing_in_subgroup, 3)[1]
    assert re.search(r"barrier failed on rank 1 after .*: rank 2 is not in it", text)
    assert ranks == (2,)


def corrupt(rank, world_size, port, name, bad_rank):
    init(rank, world_size, port)
    original = getattr(dist, name)

    def wrong(*args, **kwargs):
        work = original(*args, **kwargs)
        work.wait()
        target = args[0] if name != "all_gather" else args[0][0]
        if rank == bad_rank:
            target[0] += 1
        return work

    setattr(dist, name, wrong)
    verify_process_group(timeout_s=10)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("all_reduce", r"all_reduce of 1024 bytes computed a wrong result on rank 1: element 0 is 4 and must be 3"),
        ("broadcast", r"broadcast from rank 1 computed a wrong result on rank 0: element 0 is 3 and must be 2"),
        ("all_gather", r"all_gather computed a wrong result on rank 1: the slot of rank 0 holds the data of rank 1"),
    ],
)
def test_wrong_answers(name, match):
    """A wrong result of any collective raises an error with the actual and the expected value; the peers do not hang."""
    bad = 0 if name == "broadcast" else 1
    errors = run_processes(corrupt, 2, name, bad)
    assert isinstance(errors[bad], VerificationError)
    assert re.search(match, str(errors[bad]))


def refused(rank, world_size, port, text):
    """The first collective of a subgroup fails as it would with NCCL."""
    init(rank, world_size, port)
    group = dist.new_group([1, 2])
    barrier = dist.barrier
    barrier()  # a rank that leaves earlier would break the connections that its peer still makes

    def fail(*args, **kwargs):
        raise dist.DistBackendError(text)

    dist.barrier = fail
    try:
        if rank:
            verify_process_group(group, timeout_s=10)
    finally:
        barrier()  # rank 0 hosts the store that the others use


def test_nccl_refuses_ranks_on_one_gpu():
    """NCCL's message becomes a SharedDeviceError with the job's ranks; ncclInvalidUsage without a reason is reported unchanged."""
    first, second = run_processes(refused, 3, torch_text(DUPLICATE))[1:]
    assert isinstance(first, SharedDeviceError)
    assert (first.ranks, second.ranks) == ((1, 2), (1, 2))
    assert str(first).startswith(
        f"NCCL refused ranks that share a GPU: {DUPLICATE}. Give each rank a GPU of its own, or use backend='gloo'."
    )
    bare = run_processes(refused, 3, torch_text())[1]
    assert isinstance(bare, VerificationError)
    assert is_invalid_usage(str(bare))


def swapped(rank, world_size, port):
    init(rank, world_size, port)
    original = dist.get_rank
    dist.get_rank = lambda group=None: {0: 1, 1: 0}.get(original(group), original(group))
    verify_process_group(timeout_s=10)


def test_swapped_ranks_do_not_pass():
    """Every sum stays the same."""
    errors = run_processes(swapped, 3)
    assert any(isinstance(error, VerificationError) for error in errors)


def missing_rank(rank, world_size, port, how):
    init(rank, world_size, port)
    if rank == 1:
        if how == "kill":
            psutil.Process().kill()
        time.sleep(3600)
    store = dist.distributed_c10d._get_default_store()
    try:
        verify_process_group(timeout_s=2)
    except VerificationError as error:
        return str(error), error.ranks
    finally:
        if rank == 2:
            store.set("has reported", "")
        else:  # rank 0 hosts the store, where the other rank looks for missing ranks
            store.wait(["has reported"], timedelta(seconds=10))
    return None


def test_rank_that_does_not_come():
    results = run_processes(missing_rank, 3, "sleep", timeout_s=20, needed=(0, 2))
    for rank in (0, 2):
        text, ranks = results[rank]
        assert "rank 1 is not in it" in text
        assert ranks == (1,)


def test_rank_that_dies():
    """If a rank is dead, all others raise an error instead of waiting."""
    results = run_processes(missing_rank, 3, "kill", timeout_s=20)
    for rank in (0, 2):
        text, ranks = results[rank]
        # Gloo may report only a lost connection, without the rank.
        lost = r"barrier failed.*(closed by peer|reset by peer|Broken pipe)"
        assert 1 in ranks or re.search(lost, text, re.DOTALL), text


def keeps_its_error(rank, world_size, port):
    """Rank 0 fails alone, keeps the error and leaves the group; the store shows that its peer has ended too."""
    init(rank, world_size, port)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        verify.Verification._broadcast = lambda self: self.store.get(1)
    try:
        verify_process_group(timeout_s=20)
    except (TypeError, VerificationError) as error:
        kept = error
    dist.destroy_process_group()
    if rank == 0:  # it hosts the store
        store.wait(["the peer has ended"])
    else:
        store.set("the peer has ended", "")
    return kept


@pytest.mark.linux(reason="on Windows Gloo does not notice that a peer has left its group")
def test_an_error_keeps_no_group():
    """The peer of a rank that failed and left the group gets an error at once, although the rank keeps its own error."""
    own, of_peer = run_processes(keeps_its_error, 2)
    assert isinstance(own, TypeError)
    assert isinstance(of_peer, VerificationError)
    assert "timed out" not in str(of_peer).lower()


def test_wrong_use():
    with pytest.raises(ValueError, match="call init_process_group"):
        verify_process_group()
    for timeout_s in (0, float("nan"), float("inf"), 1e10, "30", True):
        with pytest.raises(ValueError, match="must be an int or float of seconds above 0, up to 1e9"):
            verify_process_group(timeout_s=timeout_s)


def figures_by_a_clock(rank, world_size, port, *, is_gloo):
    """Simulate a clock: a tensor takes 100 s, the very first all_reduce 10 s, then of each size one takes 3 s and one 1 s."""
    init(rank, world_size, port)
    now, calls = [0.0], {}
    original, pattern = dist.all_reduce, verify.Verification._pattern

    def slow_pattern(self, num_bytes):
        now[0] += 100
        return pattern(self, num_bytes)

    def slow_all_reduce(tensor, **kwargs):
        work = original(tensor, **kwargs)
        # The last device is the first in the group.
        seconds = calls.setdefault(tensor.numel(), [1.0, 3.0] if calls else [1.0, 3.0, 10.0])
        now[0] += seconds.pop()
        return work

    verify.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=time.sleep)
    verify.Verification._pattern, dist.all_reduce = slow_pattern, slow_all_reduce
    if not is_gloo:
        verify.Verification.backend = "another"
    return verify_process_group(timeout_s=100_000)


@pytest.mark.parametrize(("is_gloo", "small_s", "large_s"), [(True, 10.0, 3.0), (False, 1.0, 1.0)])
def test_figures_are_those_of_the_collective(is_gloo, small_s, large_s):
    """Tensors and comparisons are not measured. Gloo on the CPU uses its only call of each size, others the faster of two."""
    (result,) = run_processes(functools.partial(figures_by_a_clock, is_gloo=is_gloo), 1)
    assert (result.latency_s, result.bandwidth_bytes_per_s) == (small_s, 1024 * 1024 / large_s)
    assert result.rank_seconds == (small_s + large_s,)


def refused_call(rank, world_size, port, error):
    """CUDA refuses a call on the last rank while its peer is in the collective."""
    init(rank, world_size, port)

    def fail(*args, **kwargs):
        raise error

    if rank == world_size - 1:
        dist.all_reduce = fail
    verify_process_group(timeout_s=10)


@pytest.mark.parametrize(
    ("name", "says", "advice"),
    [
        ("mps_clients", "resources required to create MPS client", "look at nvidia-smi on that rank's node"),
        ("no_pinned_memory", "CUDA error: out of memory", "No host memory can be pinned"),
    ],
)
def test_what_cuda_refuses(name, says, advice):
    """The rank with the error reports it, without blaming another rank or the network."""
    peer, error = run_processes(refused_call, 2, RuntimeError(recorded(name)))
    assert (type(peer), type(error)) == (VerificationError, VerificationError)
    assert error.ranks == (1,)
    assert says in str(error)
    assert advice in str(error)
    assert "network" not in str(error)


def test_out_of_memory_passes_through():
    """A full device is not a failure of the group."""
    (error,) = run_processes(refused_call, 1, torch.cuda.OutOfMemoryError("Tried to allocate 2.00 MiB."))
    assert (type(error), str(error)) == (torch.cuda.OutOfMemoryError, "Tried to allocate 2.00 MiB.")


@pytest.mark.parametrize(
    ("free", "is_full"), [(None, True), (0, True), (1 << 30, False)], ids=["no context", "full", "pinned memory"]
)
@pytest.mark.parametrize("release", RELEASES)
def test_no_memory_for_a_context(monkeypatch, release, free, is_full):
    """It is not torch's OutOfMemoryError, and a refusal to pin host memory has the same message."""
    assert recorded("device_full", release) == recorded("no_pinned_memory", release)

    def mem_get_info(device):
        if free is None:
            raise RuntimeError(recorded("device_full", release))
        return free, 1 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    error = RuntimeError(recorded("device_full", release))
    assert verify_failure._has_no_memory(error, torch.device("cuda:0")) == is_full
    assert not verify_failure._has_no_memory(error, torch.device("cpu"))
    assert not verify_failure._has_no_memory(RuntimeError(recorded("exclusive", release)), torch.device("cuda:0"))


def never_ends(rank, world_size, port, blocks_store):
    """A collective without its own timeout, like NCCL's connecting and CUDA's waits, which may block the store's client."""
    init(rank, world_size, port)
    dist.all_reduce = lambda *args, **kwargs: threading.Event().wait()
    if blocks_store:
        verify_failure._looked_up = lambda verification: threading.Event().wait()
    verify_process_group(timeout_s=0.5)


@pytest.mark.parametrize(("blocks_store", "ranks"), [(False, (0,)), (True, ())])
def test_a_collective_without_a_limit_is_left(blocks_store, ranks):
    """Gloo would have ended a wait for others, so this rank is named; no rank is if the store does not answer."""
    (error,) = run_processes(never_ends, 1, blocks_store, timeout_s=30)
    assert (type(error), error.ranks) == (VerificationError, ranks)
    assert re.search(r"all_reduce of 1 KiB failed on rank 0 .*no answer within 0.5 s", str(error))


def both_halves(rank, world_size, port):
    """Return the verified devices of a group with one backend for the CPU and another for CUDA."""
    dist.Backend.register_backend(
        "second", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size), devices=["cpu", "cuda"]
    )
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:second", init_method=store, rank=rank, world_size=world_size)
    torch.cuda.is_available = lambda: True
    seen = []
    verify._verify_on = lambda group, device, timeout_s: seen.append(str(device))
    verify_process_group()
    verify_process_group(device="cpu")
    return seen


def test_a_pair_of_backends_is_verified_in_both_halves():
    """Each backend of a group is verified, and the last one provides the result; an explicit device is the only one verified."""
    assert run_processes(both_halves, 1) == [["cuda", "cpu", "cpu"]]


@pytest.mark.parametrize(
    ("backends", "used", "platform", "expected"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, False, "linux", ["cpu", "cuda"]),
        ({"cpu": "gloo", "cuda": "staged"}, False, "win32", ["cpu", "cuda"]),
        ({"cpu": "staged", "cuda": "staged"}, False, "linux", ["cuda"]),
        ({"cpu": "gloo", "cuda": "gloo"}, False, "linux", ["cpu"]),
        ({"cpu": "gloo", "cuda": "gloo"}, True, "linux", ["cuda"]),
        ({"cpu": "gloo", "cuda": "gloo"}, True, "win32", ["cpu"]),
        ({"cpu": "ipc", "cuda": "ipc"}, True, "linux", ["cuda"]),
        ({"cpu": "gloo"}, True, "linux", ["cpu"]),
    ],
)
def test_the_tensors_are_those_that_training_will_use(backends, used, platform, expected, monkeypatch):
    """CUDA tensors if the backend is for them or the process has used CUDA; never for Gloo on Windows, which would end it."""
    monkeypatch.setattr(verify, "backends_by_device", lambda group=None: backends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(verify.sys, "platform", platform)
    assert list(map(str, verify._default_devices(None))) == expected
