"""The emulated NCCL with torch's real ProcessGroupNCCL: exact collectives, refusals of every version, faults and their results.

ray_fracbackend/decide/error_texts.py parses NCCL's refusals in torch's messages.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ipc_harness import run_ranks, values
from ipc_table import Run, cases_of, expected, pairwise, same
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ray_fracbackend.staged  # noqa: F401 (registers both backends)
from ray_fracbackend._torch import CONNECTS_NCCL_AT_ONCE
from ray_fracbackend.decide.error_texts import cause_of, is_invalid_usage, refusal_in, refused_ranks
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.timeouts import Deadline
from ray_fracbackend.worker.group_end import end_process_group
from ray_fracbackend.worker.process_group import _verify, start_worker
from ray_fracbackend.worker.store import hold_store
from tests.cuda.emulated import COMMON_DTYPES, MAKES_NCCL, run_program, uuid
from tests.unit.builders import worker_plan

pytestmark = pytest.mark.timeout(120)

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
            own = {"IPC_TEST_DEVICE": f"cuda:{rank % int(common['CUDA_RIG_DEVICES'])}"}
            return {**own, **common, **of_rank(rank)}

        return run_ranks(function, size, *args, env=variables, limit_s=90.0, timeout_s=timeout_s, needed=needed)

    return on_ranks


def start(job, bind=False):
    """Start NCCL on the rank's own device, or on the only visible one; bound to it, the communicator is created at once."""
    device = torch.device("cuda", job.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    job.init("nccl", device_id=device if bind else None)
    return device


# ---- collectives


def collectives(job):
    """Run the table, point to point, and operations and types that are NCCL's own."""
    device, rank, num = start(job), job.rank, job.size
    ops = (None, dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    cases = [case for case in cases_of(num, COMMON_DTYPES) if case.op in ops and case.shape in ("small", "large")]
    for case in pairwise(cases, 0):
        found, wanted = Run(case, dist.group.WORLD).results(), expected(case)
        assert len(found) == len(wanted), case
        assert all(map(same, found, wanted)), case
    received = torch.zeros(5, device=device)
    own = torch.full((5,), float(rank), device=device)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own, (rank + 1) % num), dist.P2POp(dist.irecv, received, (rank - 1) % num)]
    ):
        work.wait()
    assert received.tolist() == [(rank - 1) % num] * 5
    if rank == 0:
        dist.send(own + 7, num - 1)
    elif rank == num - 1:
        dist.recv(received, 0)
        assert received.tolist() == [7.0] * 5
    premul = dist._make_nccl_premul_sum(0.5)
    for value, op, result in (
        (2.0, dist.ReduceOp.PRODUCT, 2.0**num),
        (float(rank), dist.ReduceOp.AVG, (num - 1) / 2),
        (2.0 * rank, premul, num * (num - 1) / 2),
        (rank == 0, dist.ReduceOp.SUM, True),
    ):
        tensor = torch.full((1000,), value, device=device)
        dist.all_reduce(tensor, op)
        assert tensor.unique().tolist() == [result]
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_is_exact(run, size):
    """All types and sizes, on separate devices."""
    values(run(collectives, size))


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
def test_groups_and_forms_of_calls(run, tmp_path, size):
    """Collectives as frameworks use them: other groups, uneven parts, several calls at once; a group removes its files at its end."""
    for right in values(run(groups, size)):
        assert set(right.values()) == {True}, right
    assert [name for name in os.listdir(tmp_path / "0") if name.startswith("nccl")] == []


# ---- ranks on one device


def first_call(job):
    """Return the error message of the group or its first all_reduce, or the result."""
    is_made = False
    try:
        start(job)
        is_made = True
        tensor = torch.ones(4, device="cuda")
        dist.all_reduce(tensor)
        return tensor.tolist()
    except RuntimeError as error:
        assert is_made != CONNECTS_NCCL_AT_ONCE
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


@pytest.mark.parametrize("version", REFUSALS)
def test_two_ranks_on_one_device_are_refused(run, version):
    """torch's error contains the message of the NCCL version, and the ranks are found in it if they are named."""
    texts = values(run(first_call, 2, CUDA_RIG_NCCL=version, **ONE_DEVICE))
    for rank, text in enumerate(texts):
        assert is_invalid_usage(text)
        if CONNECTS_NCCL_AT_ONCE:  # torch 2.15 does not pass the reason on
            continue
        sentence = REFUSALS[version].format(rank, 1 - rank)
        assert f"NCCL version {version}" in text
        assert f"Last error:\n{sentence}" in text
        found = refusal_in(text)
        assert found
        assert f"{sentence.split('. ')[0]}" in f"{found} "
        assert refused_ranks(text) == ((0, 1) if sentence.startswith("Duplicate") else ())
        assert sentence.strip() in cause_of(RuntimeError(text))
        assert "\n" not in cause_of(RuntimeError(text))


@pytest.mark.parametrize(("version", "refused"), [("2.28.9", [0, 2]), ("2.30.7", [0, 1, 2])])
def test_refused_ranks(run, version, refused):
    """Up to 2.29 the sharing ranks are refused, and the others lose their peers; from 2.30 on all ranks are refused."""
    visible, env = ["0", "1", "0"], {"CUDA_RIG_NCCL": version, "CUDA_RIG_DEVICES": "2"}
    texts = values(run(first_call, 3, of_rank=lambda rank: {"CUDA_VISIBLE_DEVICES": visible[rank]}, **env))
    assert [rank for rank, text in enumerate(texts) if is_invalid_usage(text)] == refused
    if version == "2.28.9":
        assert CONNECTS_NCCL_AT_ONCE or refused_ranks(texts[0]) == (0, 2)
        assert "remote process exited" in texts[1]


SLICES = {"CUDA_RIG_MIG": "2"}


@pytest.mark.parametrize(
    ("version", "env", "refusal"),
    [
        ("2.28.9", MULTI_RANK, "Duplicate GPU"),
        ("2.30.4", MULTI_RANK, None),
        ("2.30.7", MULTI_RANK, None),
        ("2.30.7", {**MULTI_RANK, "NCCL_NVLS_ENABLE": "0"}, None),
        ("2.30.7", {**MULTI_RANK, "NCCL_NVLS_ENABLE": "1"}, 'NCCL_NVLS_ENABLE has been set to "1"'),
        ("2.30.7", {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, "Multiple Ranks are using the same GPU/Partition"),
        # Slices have the same PCI bus id but different UUIDs.
        ("2.28.9", SLICES, "Duplicate GPU"),
        ("2.30.4", SLICES, "Multiple ranks"),
        ("2.30.7", SLICES, None),
        # The hosts are different, like those of two containers.
        *((version, {"NCCL_HOSTID": ""}, None) for version in ("2.28.9", "2.30.7")),
    ],
)
def test_what_is_refused(run, version, env, refusal):
    """NCCL 2.30 accepts several ranks with its variable set, but not together with NVLS."""

    def of_rank(rank):
        own = {"CUDA_VISIBLE_DEVICES": uuid(0, rank)} if env is SLICES else {}
        return {**own, **({"NCCL_HOSTID": str(rank)} if "NCCL_HOSTID" in env else {})}

    for text in values(run(first_call, 2, of_rank=of_rank, CUDA_RIG_NCCL=version, **{**ONE_DEVICE, **env})):
        assert text == [2.0] * 4 if refusal is None else is_invalid_usage(text)
        assert CONNECTS_NCCL_AT_ONCE or refusal is None or refusal_in(text).startswith(refusal)


# ---- faults, and how torch ends them


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


def planned(job, backend, device, port, **more):
    common = {"timeout_s": 60, "budget_s": 20, "backend": backend, "device": str(device), "master_port": port}
    return worker_plan(rank=job.rank, world_size=job.size, **{**common, **more})


def verified_without_a_device(job, backend):
    """Return what a worker without a device from Ray verifies, and whether it has used CUDA by then."""
    job.init(backend)
    result = _verify(planned(job, backend, "cuda", job.port), Deadline(20))
    return result.device if result else None, torch.cuda.is_initialized()


@pytest.mark.skipif(CONNECTS_NCCL_AT_ONCE, reason="torch 2.15 uses the device with the number LOCAL_RANK at once")
@pytest.mark.parametrize(("backend", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("nccl", None)])
def test_a_device_that_ray_did_not_assign_is_not_touched(run, backend, device):
    """The script chooses the worker's device: on the first device all ranks would meet, and NCCL would refuse them."""
    assert values(run(verified_without_a_device, 2, backend, **ONE_DEVICE)) == [(device, False)] * 2


def started(job, backend, **more):
    """Start like a worker of Ray Train on the rank's own device, with a store of rank 0."""
    torch.cuda.set_device(job.rank)
    if job.rank == 0:
        job.store().set(backend, str(hold_store(None, one_node=True)))
    return start_worker(planned(job, backend, f"cuda:{job.rank}", int(job.store().get(backend)), **more))


def fall_back_and_go_on(job, is_trial):
    """Start NCCL, which fails, then Gloo, and use it for six seconds; return the failure, and the number of the last call."""
    try:
        started(job, "nccl", budget_s=4, is_trial=is_trial)
        return "passed", 0
    except FracBackendError as error:
        text = str(error)
    started(job, "gloo")
    for number in range(60):
        tensor = torch.ones(4, device="cuda")
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(job.size)] * 4, number
        time.sleep(0.1)
    return text, number


@pytest.mark.parametrize(
    ("fault", "is_trial", "said"),
    [
        *((f"nccl_{fault}", True, "NCCL hangs") for fault in ("init_hang", "hang=1", "hang=3")),
        ("nccl_late_error=3", True, "failed on rank"),
        ("nccl_refuse=1", True, "rank 1|NCCL fails on that rank"),  # rank 0 waited for it
        # No call was started that the watchdog could monitor, so a separate trial group is not needed.
        ("nccl_duplicate", False, "NCCL refused ranks that share a GPU|creating the nccl .*NCCL fails"),
    ],
)
def test_the_group_after_one_that_failed(run, fault, is_trial, said):
    """The watchdog of the failed NCCL group does not affect the group that replaces it."""
    for text, number in values(run(fall_back_and_go_on, 2, is_trial, CUDA_RIG_FAULT=fault, **WATCHDOG)):
        assert re.search(said, text)
        assert number == 59


ABANDONED = """
import sys
from tests.unit.builders import worker_plan
from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.worker import process_group, store
for backend, budget_s in (("nccl", 4), ("gloo", 20)):
    plan = {"backend": backend, "budget_s": budget_s, "is_trial": backend == "nccl", "world_size": 1, "device": "cuda:0"}
    try:
        process_group.start_worker(worker_plan(**plan, master_port=store.hold_store(None, one_node=True)))
    except FracBackendError as error:
        assert backend == "nccl"
sys.exit(3)
"""


def test_a_process_with_a_thread_in_the_init_ends():
    """Nothing can end that thread; the interpreter still comes down."""
    done = run_program(ABANDONED, CUDA_RIG_FAULT="nccl_init_hang", TORCH_NCCL_ASYNC_ERROR_HANDLING="1", **WATCHDOG)
    assert done.returncode == 3, done.stderr


def start_with_a_short_timeout(job):
    """Return the error of a start whose NCCL hangs, with a timeout of the group that is shorter than the start's."""
    try:
        started(job, "nccl", budget_s=6, timeout_s=1)
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
    result = started(job, "nccl", is_trial=True)
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    return os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], tensor.sum().item(), result and result.backend


def test_a_group_that_could_have_been_replaced(run):
    """It trains with torch's error handling, as with stock."""
    assert values(run(try_and_start, 2)) == [("1", 8.0, "nccl"), ("1", 8.0, None)]


def leave_alone(job, leave):
    """Leave a working group after the other rank has aborted it; return whether this ended in time."""
    started(job, "nccl")
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
    started(job, "nccl", is_trial=True, timeout_s=3)
    try:
        for _ in range(200):
            dist.all_reduce(torch.ones(4, device="cuda"))
            torch.cuda.synchronize()
    except RuntimeError:  # the watchdog aborts the call before it ends the process
        time.sleep(60)
    return "trained"


def test_its_watchdog_ends_a_process_that_hangs(run):
    """In training the config's timeout applies again, and torch ends the process after it."""
    outcomes = run(lose_a_call, 2, CUDA_RIG_FAULT="nccl_hang=100", **WATCHDOG)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGABRT] * 2


# ---- device meshes beside the default group


def sums(job, backend, from_group):
    """Compute a sum over a mesh of all ranks; return its result or error."""
    torch.cuda.set_device(0)
    job.init(backend)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda") if from_group else init_device_mesh("cuda", (job.size,))
    tensor = torch.full((3,), job.rank + 1.0, device="cuda")
    try:
        dist.all_reduce(tensor, group=mesh.get_group())
        return tensor.tolist()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("from_group", [False, True], ids=["init_device_mesh", "from_group"])
@pytest.mark.parametrize("backend", ["gloo", "ipc", "cpu:gloo,cuda:staged"])
def test_a_mesh_of_all_ranks(run, backend, from_group):
    """It uses the default group or one with the same backend; only old releases of torch use NCCL beside Gloo."""
    for result in values(run(sums, 2, backend, from_group, **ONE_DEVICE)):
        if backend == "gloo" and not from_group and MAKES_NCCL:
            assert is_invalid_usage(result)
        else:
            assert result == [3.0] * 3
