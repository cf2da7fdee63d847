"""The emulated NCCL with torch's real ProcessGroupNCCL: exact collectives, refusals of every version, faults and their results.

ray_fracbackend/decide/error_texts.py parses NCCL's refusals in torch's messages.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "ipc"))

from ipc_harness import run_ranks, values

from ray_fracbackend.decide.error_texts import cause_of, is_invalid_usage, refusal_in, refused_ranks
from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.timeouts import Deadline, bounded
from ray_fracbackend.verify import verify_process_group
from ray_fracbackend.worker.group_end import end_process_group
from ray_fracbackend.worker.process_group import _verify, start_worker
from ray_fracbackend.worker.store import hold_store
from tests.cuda.emulated import needs_rig, uuid

pytestmark = [needs_rig, pytest.mark.timeout(120)]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
]
# Every type, and sizes of one and of several chunks.
KINDS = [*((dtype, 1000) for dtype in DTYPES), *product((torch.float32, torch.bfloat16), (1, 100_003))]
# The watchdog ends its process one second after a timeout, not a minute.
WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
HANGS_S = 4.0


@pytest.fixture
def run(tmp_path):
    """Run a function on ranks with a GPU each, or with these variables for each of them."""
    numbers = iter(range(100))

    def on_ranks(function, size, *args, of_rank=lambda rank: {}, timeout_s=30.0, needed=None, **env):
        state = tmp_path / str(next(numbers))
        state.mkdir()
        common = {"CUDA_RIG_DEVICES": str(size), "CUDA_RIG_STATE": str(state), **env}

        def variables(rank):
            return {**common, **of_rank(rank)}

        return run_ranks(function, size, *args, env=variables, limit_s=90.0, timeout_s=timeout_s, needed=needed)

    return on_ranks


def start(job, bind=False):
    """Start NCCL on the rank's own device, or on the only visible one; bound to it, the communicator is created at once."""
    device = torch.device("cuda", job.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        store=job.store(),
        rank=job.rank,
        world_size=job.size,
        timeout=timedelta(seconds=job.timeout_s),
        device_id=device if bind else None,
    )
    return device


# ---- collectives


def _all_reduce(op, expected):
    def call(of, rank, num):
        tensor = of(rank)
        dist.all_reduce(tensor, op)
        return tensor, expected([of(each) for each in range(num)])

    return call


def _broadcast(of, rank, num):
    tensor = of(rank)
    dist.broadcast(tensor, num - 1)
    return tensor, of(num - 1)


def _reduce(of, rank, num):
    tensor = of(rank)
    dist.reduce(tensor, num - 1)
    return (tensor, sum(of(each) for each in range(num))) if rank == num - 1 else (of(0), of(0))


def _all_gather(of, rank, num):
    found = [torch.zeros_like(of(0)) for _ in range(num)]
    dist.all_gather(found, of(rank))
    return torch.cat(found), torch.cat([of(each) for each in range(num)])


def _all_gather_into_tensor(of, rank, num):
    found = torch.zeros_like(of(0)).repeat(num)
    dist.all_gather_into_tensor(found, of(rank))
    return found, torch.cat([of(each) for each in range(num)])


def _reduce_scatter(of, rank, num):
    found = torch.zeros_like(of(0))
    dist.reduce_scatter(found, [of(rank + each) for each in range(num)])
    return found, sum(of(rank + each) for each in range(num))


def _reduce_scatter_tensor(of, rank, num):
    found = torch.zeros_like(of(0))
    dist.reduce_scatter_tensor(found, torch.cat([of(rank + each) for each in range(num)]))
    return found, sum(of(rank + each) for each in range(num))


def _all_to_all(of, rank, num):
    found = [torch.zeros_like(of(0)) for _ in range(num)]
    dist.all_to_all(found, [of(rank + 2 * each) for each in range(num)])
    return torch.cat(found), torch.cat([of(each + 2 * rank) for each in range(num)])


def _all_to_all_single(of, rank, num):
    sent = torch.cat([of(rank + 2 * each) for each in range(num)])
    found = torch.zeros_like(sent)
    dist.all_to_all_single(found, sent)
    return found, torch.cat([of(each + 2 * rank) for each in range(num)])


def _gather(of, rank, num):
    found = [torch.zeros_like(of(0)) for _ in range(num)]
    dist.gather(of(rank), found if rank == 0 else None, 0)
    return (torch.cat(found), torch.cat([of(each) for each in range(num)])) if rank == 0 else (of(0), of(0))


def _scatter(of, rank, num):
    found = torch.zeros_like(of(0))
    dist.scatter(found, [of(each) for each in range(num)] if rank == 1 else None, 1)
    return found, of(rank)


def _ring(of, rank, num):
    found = torch.zeros_like(of(0))
    calls = [dist.P2POp(dist.isend, of(rank), (rank + 1) % num), dist.P2POp(dist.irecv, found, (rank - 1) % num)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return found, of((rank - 1) % num)


def _send_and_receive(of, rank, num):
    found = of(0)
    if rank == 0:
        dist.send(of(num), num - 1)
    elif rank == num - 1:
        dist.recv(found, 0)
        return found, of(num)
    return of(0), of(0)


CALLS = {
    "sum": _all_reduce(dist.ReduceOp.SUM, sum),
    "max": _all_reduce(dist.ReduceOp.MAX, lambda all_: torch.stack(all_).amax(0)),
    "min": _all_reduce(dist.ReduceOp.MIN, lambda all_: torch.stack(all_).amin(0)),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "batch_isend_irecv": _ring,
    "send and recv": _send_and_receive,
}


def wrong_calls(job):
    """Return calls of the table whose result is not exact, on tensors that every type represents exactly."""
    device = start(job)
    wrong = []
    for (dtype, size), name in product(KINDS, CALLS):
        pattern = torch.arange(size, device=device) % 5

        def of(number, pattern=pattern, dtype=dtype):
            return (pattern + number + 1).to(dtype)

        found, expected = CALLS[name](of, job.rank, job.size)
        if not torch.equal(found, expected):
            wrong.append((name, str(dtype), size))
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_is_exact(run, size):
    """All types and sizes, on separate devices."""
    assert values(run(wrong_calls, size)) == [[]] * size


def special_sums(job):
    """Compute PRODUCT, AVG, PREMUL_SUM, bool and the float8 types."""
    device = start(job)
    num, found = job.size, {}

    def reduced(tensor, op=dist.ReduceOp.SUM):
        dist.all_reduce(tensor, op)
        return tensor.cpu().float().unique().tolist()

    def full(value, dtype=torch.float32):
        return torch.full((1000,), float(value), device=device).to(dtype)

    found["product"] = reduced(full(2), dist.ReduceOp.PRODUCT), [2.0**num]
    found["average"] = reduced(full(job.rank), dist.ReduceOp.AVG), [(num - 1) / 2]
    premul = dist._make_nccl_premul_sum(0.5)
    found["premultiplied"] = reduced(full(2 * job.rank), premul), [num * (num - 1) / 2]
    found["bool"] = reduced(torch.full((9,), job.rank == 0, device=device)), [1.0]
    dist.destroy_process_group()
    return found


def test_other_reductions(run):
    """NCCL's own operations, and types that are not NCCL numbers."""
    for found in values(run(special_sums, 3)):
        for result, expected in found.values():
            assert result == expected


def groups(job):
    """Run uneven splits, coalesced and overlapping calls, other groups and split groups; return actual and correct results."""
    device, rank, num = start(job, bind=True), job.rank, job.size

    def full(value, count=1000):
        return torch.full((count,), float(value), device=device)

    def summed(group, members):
        tensor = full(rank + 1)
        if rank in members:
            dist.all_reduce(tensor, group=group)
            return tensor.unique().tolist() == [sum(each + 1 for each in members)]
        return True

    right = {}
    received = torch.zeros(num * (rank + 1), device=device)
    dist.all_to_all_single(received, full(rank, sum(range(1, num + 1))), [rank + 1] * num, list(range(1, num + 1)))
    right["uneven"] = received.tolist() == torch.arange(num).repeat_interleave(rank + 1).tolist()
    tensors = [full(index + rank) for index in range(20)]
    sums = [[num * index + num * (num - 1) / 2] for index in range(20)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    right["overlapping"] = [tensor.unique().tolist() for tensor in tensors] == sums
    tensors = [full(index + rank) for index in range(20)]
    with distributed_c10d._coalescing_manager(device=device, async_ops=True) as calls:
        for tensor in tensors:
            dist.all_reduce(tensor)
    calls.wait()
    right["coalesced"] = [tensor.unique().tolist() for tensor in tensors] == sums
    members = [num - 1, 0]
    right["new_group"] = summed(dist.new_group(members), members)
    halves = [list(range(0, num, 2)), list(range(1, num, 2))]
    right["split_group"] = summed(dist.split_group(dist.group.WORLD, halves), halves[rank % 2])
    objects = [None] * num
    dist.all_gather_object(objects, {"rank": rank})
    right["objects"] = objects == [{"rank": each} for each in range(num)]
    dist.barrier()
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("size", [2, 4])
def test_groups_and_forms_of_calls(run, size):
    """Collectives as frameworks use them: other groups, uneven parts, several calls at once."""
    for right in values(run(groups, size)):
        assert set(right.values()) == {True}, right


def train(job):
    """Run three steps of DDP on this rank's part of the batches, and of the same network on whole batches."""
    device = start(job)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).double().to(device)
    alone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).double().to(device)
    alone.load_state_dict(network.state_dict())
    parallel = DistributedDataParallel(network)
    for model, part in ((parallel, slice(job.rank, None, job.size)), (alone, slice(None))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(24, 36, generator=generator, dtype=torch.float64).to(device)[part]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch[:, :32]), batch[:, 32:]).backward()
            optimizer.step()
    away = max((a - b).abs().max().item() for a, b in zip(network.parameters(), alone.parameters(), strict=True))
    dist.destroy_process_group()
    return away


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_is_one_process(run, size):
    """DDP with NCCL trains to the parameters of one process with whole batches."""
    assert max(values(run(train, size))) < 1e-12


# ---- ranks on one device


def first_call(job):
    """Return the error message of the first all_reduce, or its result."""
    start(job)
    tensor = torch.ones(4, device="cuda")
    try:
        dist.all_reduce(tensor)
        return tensor.tolist()
    except RuntimeError as error:
        return str(error)


DUPLICATE = "Duplicate GPU detected : rank {} and rank {} both on CUDA device "
REFUSALS = {
    "2.18.5": DUPLICATE,
    "2.21.5": DUPLICATE,
    "2.28.9": DUPLICATE,
    "2.30.4": "Multiple ranks detected using the same GPU on this node. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable",
    "2.30.7": "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable",
}
ONE_DEVICE = {"CUDA_RIG_DEVICES": "1"}
MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def is_sum(text, num):
    """Return whether the call succeeded."""
    return text == [float(num)] * 4


@pytest.mark.parametrize("version", REFUSALS)
def test_two_ranks_on_one_device_are_refused(run, version):
    """torch's error contains the message of the NCCL version, and the ranks are found in it if they are named."""
    texts = values(run(first_call, 2, CUDA_RIG_NCCL=version, **ONE_DEVICE))
    for rank, text in enumerate(texts):
        sentence = REFUSALS[version].format(rank, 1 - rank)
        assert f"NCCL version {version}" in text
        assert f"Last error:\n{sentence}" in text
        found = refusal_in(text)
        assert found
        assert f"{sentence.split('. ')[0]}" in f"{found} "
        assert refused_ranks(text) == ((0, 1) if sentence.startswith("Duplicate") else ())
        assert is_invalid_usage(text)
        assert sentence.strip() in cause_of(RuntimeError(text))
        assert "\n" not in cause_of(RuntimeError(text))


@pytest.mark.parametrize(("version", "refused"), [("2.28.9", [0, 2]), ("2.30.7", [0, 1, 2])])
def test_refused_ranks(run, version, refused):
    """Up to 2.29 the sharing ranks are refused, and the others lose their peers; from 2.30 on all ranks are refused."""
    visible = ["0", "1", "0"]
    texts = values(
        run(
            first_call,
            3,
            of_rank=lambda rank: {"CUDA_VISIBLE_DEVICES": visible[rank]},
            CUDA_RIG_NCCL=version,
            CUDA_RIG_DEVICES="2",
        )
    )
    assert [rank for rank, text in enumerate(texts) if refusal_in(text)] == refused
    if version == "2.28.9":
        assert refused_ranks(texts[0]) == (0, 2)
        assert "ncclRemoteError" in texts[1]
        assert not is_invalid_usage(texts[1])


@pytest.mark.parametrize(
    ("version", "env", "refusal"),
    [
        ("2.28.9", MULTI_RANK, "Duplicate GPU"),
        ("2.30.4", MULTI_RANK, None),
        ("2.30.7", MULTI_RANK, None),
        ("2.30.7", {**MULTI_RANK, "NCCL_NVLS_ENABLE": "0"}, None),
        (
            "2.30.7",
            {**MULTI_RANK, "NCCL_NVLS_ENABLE": "1"},
            'NCCL_NVLS_ENABLE has been set to "1" and communicator has',
        ),
        ("2.30.7", {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, "Multiple Ranks are using the same GPU/Partition"),
    ],
)
def test_flags_for_several_ranks(run, version, env, refusal):
    """NCCL 2.30 accepts them with its variable set, but not together with NVLS."""
    for text in values(run(first_call, 2, CUDA_RIG_NCCL=version, **ONE_DEVICE, **env)):
        assert is_sum(text, 2) if refusal is None else (refusal_in(text) or "").startswith(refusal)


@pytest.mark.parametrize(("version", "refused"), [("2.28.9", True), ("2.30.4", True), ("2.30.7", False)])
def test_slices_of_one_gpu(run, version, refused):
    """They have the same PCI bus id but different UUIDs."""

    def of_rank(rank):
        return {"CUDA_VISIBLE_DEVICES": uuid(0, rank)}

    for text in values(run(first_call, 2, of_rank=of_rank, CUDA_RIG_NCCL=version, CUDA_RIG_MIG="2", **ONE_DEVICE)):
        assert bool(refusal_in(str(text))) == refused
        assert refused or is_sum(text, 2)


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_ranks_of_different_hosts_are_not_compared(run, version):
    """NCCL_HOSTID makes the hosts different, like those of two containers."""
    texts = values(
        run(first_call, 2, of_rank=lambda rank: {"NCCL_HOSTID": str(rank)}, CUDA_RIG_NCCL=version, **ONE_DEVICE)
    )
    assert all(is_sum(text, 2) for text in texts)


# ---- faults, and how torch ends them


def first_call_in_time(job):
    """As `first_call`, or report a hang."""
    device = start(job)

    def call():
        torch.cuda.set_device(device)  # per thread
        tensor = torch.ones(4, device="cuda")
        dist.all_reduce(tensor)
        return tensor.tolist()

    try:
        return bounded(call, HANGS_S)
    except TimeoutError:
        return "hangs"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("fault", "codes", "cause"),
    [
        ("nccl_refuse=1", "ncclSystemError", "Call to socket failed (fault nccl_refuse)"),
        ("nccl_oom=1", "ncclUnhandledCudaError", "Cuda failure 2 'out of memory'"),
    ],
)
def test_a_rank_that_cannot_start(run, fault, codes, cause):
    """It reports the reason in one line of ours; its peer waits for it."""
    waiting, failed = values(run(first_call_in_time, 2, CUDA_RIG_FAULT=fault))
    assert waiting == "hangs"
    assert codes in failed
    assert refusal_in(failed) is None
    assert not is_invalid_usage(failed)
    assert cause_of(RuntimeError(failed)).endswith(f": {cause}")


def test_init_that_hangs(run):
    """No rank returns, and torch has no time limit for it."""
    assert values(run(first_call_in_time, 2, CUDA_RIG_FAULT="nccl_init_hang")) == ["hangs", "hangs"]


def calls_until_the_end(job, num_calls):
    """Run a number of calls by rank, the first of which is correct, until torch's watchdog ends the process."""
    device = start(job)
    for number in range(num_calls[job.rank]):
        tensor = torch.ones(4, device=device)
        dist.all_reduce(tensor)
        assert number or tensor.tolist() == [2.0] * 4
    time.sleep(60)


@pytest.mark.parametrize(
    ("fault", "num_calls"),
    [("", (2, 1)), ("nccl_hang=2", (2, 2)), ("nccl_late_error=2", (2, 2))],
    ids=["no peer", "hang", "late"],
)
def test_the_watchdog_ends_a_rank(run, fault, num_calls):
    """If a peer never makes the call, the call never completes, or the communicator fails, no rank keeps waiting."""
    first = run(calls_until_the_end, 2, num_calls, timeout_s=3.0, needed=1, CUDA_RIG_FAULT=fault, **WATCHDOG)[0]
    assert first.exitcode == -signal.SIGABRT, (first.value, first.error, first.trace)


def call_after_an_error(job):
    """Return the error message of the first call after the communicator has failed."""
    device = start(job)
    try:
        for _ in range(100):
            dist.all_reduce(torch.ones(4, device=device))
            time.sleep(0.05)
    except RuntimeError as error:
        return str(error)
    return "none"


def test_a_communicator_that_fails(run):
    """The next call raises NCCL's reason: on the rank at fault its own, on its peers that they lost one."""
    # Otherwise the watchdog may end a rank before its next call; with torch 2.7 it does.
    env = {"CUDA_RIG_FAULT": "nccl_late_error=2", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    failed, peer = values(run(call_after_an_error, 2, **env))
    assert "ncclSystemError" in failed
    assert cause_of(RuntimeError(failed)).endswith("Call to recv failed (fault nccl_late_error)")
    assert "ncclRemoteError" in peer
    assert cause_of(RuntimeError(peer)).endswith("Connection closed by remote peer (fault nccl_late_error)")


def aborted(job):
    """Return the seconds until a hanging collective returns after another thread aborted the group."""
    device = start(job)
    dist.all_reduce(torch.ones(4, device=device))
    torch.cuda.synchronize()
    threading.Timer(1.0, distributed_c10d._abort_process_group).start()
    started = time.monotonic()
    dist.all_reduce(torch.ones(4, device=device))
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    tensor = torch.ones(4, device=device) + 1
    return seconds, tensor.tolist()


def test_abort_frees_a_hanging_collective(run):
    """The stream continues, and the process can use its device."""
    for seconds, tensor in values(run(aborted, 2, CUDA_RIG_FAULT="nccl_hang=2", timeout_s=60.0)):
        assert 0.5 < seconds < 10
        assert tensor == [2.0] * 4


def waited_and_aborted(job):
    """Return the error of a hanging call with its own time limit; afterwards abort the group and use the device."""
    device = start(job)
    dist.all_reduce(torch.ones(4, device=device))
    text = ""
    try:
        dist.all_reduce(torch.ones(4, device=device), async_op=True).wait(timedelta(seconds=1))
    except RuntimeError as error:
        text = str(error)
    bounded(distributed_c10d._abort_process_group, 10)
    return text, (torch.ones(4, device=device) + 1).tolist()


def test_a_wait_with_a_limit(run):
    """It raises an error and ends the communicator: the later abort finds none."""
    for text, tensor in values(run(waited_and_aborted, 2, CUDA_RIG_FAULT="nccl_hang=2", timeout_s=60.0)):
        assert "Watchdog caught collective operation timeout" in text
        assert tensor == [2.0] * 4


def verified(job):
    """Return class, message and ranks of the error of a verification that has three seconds."""
    device = start(job)
    # The time limit is for the group, not for the first kernel of a process on a busy machine.
    torch.ones(4, device=device).sum().item()
    store = job.store()
    store.set(f"ready/{job.rank}", "")
    store.wait([f"ready/{rank}" for rank in range(job.size)])
    try:
        verify_process_group(device=device, timeout_s=3)
    except (RuntimeError, FracBackendError) as error:
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    return "passed", "", ()


REFUSED = "Call to socket failed (fault nccl_refuse)"
LATE = "no answer within 3 s"
# By fault: a rank, class of its error, step, cause and rank at fault; for a hang none, or a rank whose clock is late.
VERIFIED = {
    "nccl_refuse=1": (1, "VerificationError", "barrier failed on rank 1", REFUSED, (1,)),
    "nccl_oom=1": (1, "OutOfMemoryError", "NCCL error in", "Cuda failure 2 'out of memory'", None),
    "nccl_init_hang": (0, "VerificationError", "barrier failed on rank 0", LATE, "any"),
    "nccl_hang=1": (0, "VerificationError", "barrier failed on rank 0", LATE, "any"),
    "nccl_hang=3": (1, "VerificationError", "all_reduce of 1 KiB failed on rank 1", LATE, "any"),
    "nccl_late_error=3": (0, "VerificationError", "KiB failed on rank 0", "(fault nccl_late_error)", (0,)),
}


@pytest.mark.parametrize("fault", VERIFIED)
def test_the_error_of_a_verification(run, fault):
    """Its step, NCCL's reason or that there was no answer, and the rank that failed by itself, not the peer that waits for it."""
    rank, kind, step, cause, ranks = VERIFIED[fault]
    found, text, named = values(run(verified, 2, CUDA_RIG_FAULT=fault))[rank]
    assert found == kind
    assert step in text
    assert cause in text
    assert "Timeout(ms)" not in text
    if ranks != "any":
        assert named == ranks
        assert "not in it" not in text


def planned(job, backend, device, port, **more):
    """Return a worker's plan of a start."""
    address = {"master_addr": "127.0.0.1", "master_port": port}
    common = {"timeout_s": 60, "budget_s": 20, "attempt": "first", "verify": True, **address}
    return WorkerPlan(rank=job.rank, world_size=job.size, backend=backend, device=str(device), **{**common, **more})


def verified_without_a_device(job, backend):
    """Return what a worker without a device from Ray verifies, and whether it has used CUDA by then."""
    dist.init_process_group(backend, store=job.store(), rank=job.rank, world_size=job.size)
    result = _verify(planned(job, backend, "cuda", job.port), Deadline(20))
    return result.device if result else None, torch.cuda.is_initialized()


@pytest.mark.parametrize(("backend", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("nccl", None)])
def test_a_device_that_ray_did_not_assign_is_not_touched(run, backend, device):
    """The script chooses the worker's device: on the first device all ranks would meet, and NCCL would refuse them."""
    assert values(run(verified_without_a_device, 2, backend, **ONE_DEVICE)) == [(device, False)] * 2


def started(job, backend, device, **more):
    """Start like a worker of Ray Train, with a store of rank 0."""
    if job.rank == 0:
        job.store().set(backend, str(hold_store(None, one_node=True)))
    return start_worker(planned(job, backend, device, int(job.store().get(backend)), **more))


def fall_back_and_go_on(job, seconds, is_trial):
    """Start NCCL, which fails, then Gloo, and use it for a while; return the failure, and the number of the last call."""
    device = torch.device("cuda", job.rank)
    torch.cuda.set_device(device)
    try:
        started(job, "nccl", device, budget_s=4, is_trial=is_trial)
        return "passed", 0
    except FracBackendError as error:
        text = str(error)
    started(job, "gloo", device)
    for number in range(10 * seconds):
        tensor = torch.ones(4, device=device)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(job.size)] * 4, number
        time.sleep(0.1)
    return text, number


@pytest.mark.parametrize(
    "fault", ["nccl_init_hang", "nccl_hang=1", "nccl_hang=3", "nccl_refuse=1", "nccl_late_error=3"]
)
def test_the_group_after_one_that_failed(run, fault):
    """The watchdog of the failed NCCL group does not affect the group that replaces it."""
    for text, number in values(run(fall_back_and_go_on, 2, 6, True, CUDA_RIG_FAULT=fault, **WATCHDOG)):
        assert "failed on rank" in text
        assert number == 59


def test_the_group_after_one_that_was_refused(run):
    """No call was started on it that the watchdog could monitor, so a separate trial group is not needed."""
    for text, number in values(run(fall_back_and_go_on, 2, 6, False, CUDA_RIG_FAULT="nccl_duplicate", **WATCHDOG)):
        assert "NCCL refused ranks that share a GPU" in text
        assert number == 59


def start_with_a_short_timeout(job):
    """Return the error of a start whose NCCL hangs, with a timeout of the group that is shorter than the start's."""
    torch.cuda.set_device(job.rank)
    try:
        started(job, "nccl", f"cuda:{job.rank}", budget_s=6, timeout_s=1)
    except FracBackendError as error:
        return str(error)
    return "passed"


def test_a_timeout_shorter_than_the_start(run):
    """The timeout is for training: if it applied to the verification, the watchdog would end the process without an error."""
    for text in values(run(start_with_a_short_timeout, 2, CUDA_RIG_FAULT="nccl_hang=3", **WATCHDOG)):
        assert "failed on rank" in text
        assert "no answer within" in text


def try_and_start(job):
    """Start NCCL with a fallback; return the final error handling of the process, the sum of a call, and the result."""
    device = torch.device("cuda", job.rank)
    torch.cuda.set_device(device)
    result = started(job, "nccl", device, is_trial=True)
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)
    return os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], tensor.sum().item(), result and result.backend


def test_a_group_that_could_have_been_replaced(run):
    """It trains with torch's error handling, as with stock."""
    assert values(run(try_and_start, 2)) == [("1", 8.0, "nccl"), ("1", 8.0, None)]


def leave_alone(job, leave):
    """Leave a working group after the other rank has aborted it; return whether this ended in time."""
    device = torch.device("cuda", job.rank)
    torch.cuda.set_device(device)
    started(job, "nccl", device)
    store = job.store()
    if job.rank == 1:
        end_process_group(failed=True)
        store.set("aborted", "")
        store.wait(["left"])
        return True
    store.wait(["aborted"])
    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    store.set("left", "")
    return not thread.is_alive()


@pytest.mark.parametrize(
    ("leave", "ends"), [(end_process_group, True), (dist.destroy_process_group, False)], ids=["ours", "torch's"]
)
def test_a_group_after_the_other_rank_has_left_it(run, leave, ends):
    """NCCL's destruction waits for the ranks of the node; a start after one that failed elsewhere must not wait."""
    assert values(run(leave_alone, 2, leave)) == [ends, True]


def lose_a_call(job):
    """Start NCCL with a fallback; one call in training never ends."""
    device = torch.device("cuda", job.rank)
    torch.cuda.set_device(device)
    started(job, "nccl", device, is_trial=True, timeout_s=3)
    try:
        for _ in range(200):
            dist.all_reduce(torch.ones(4, device=device))
            torch.cuda.synchronize()
    except RuntimeError:  # the watchdog aborts the call before it ends the process
        time.sleep(60)
    return "trained"


def test_its_watchdog_ends_a_process_that_hangs(run):
    """In training the config's timeout applies again, and torch ends the process after it."""
    outcomes = run(lose_a_call, 2, CUDA_RIG_FAULT="nccl_hang=100", **WATCHDOG)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGABRT] * 2


def test_nothing_is_left(run, tmp_path):
    """A group removes its files at its end."""
    values(run(groups, 2))
    assert [name for name in os.listdir(tmp_path / "0") if name.startswith("nccl")] == []
