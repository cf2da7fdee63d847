"""The ipc backend on real device memory: exact results, order by waits of the streams, faults, memory, torch's users.

Needs a CUDA device, torch and pytest; nothing else. Several ranks share device 0 unless a test says otherwise.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "ipc"))

from ipc_calls import bare_group, options
from ipc_device_calls import CALLS, device_group
from ipc_device_faults import check_signal, error_of, struck_by_exception
from ipc_fault_runs import strike
from ipc_harness import DEVICE_ENV_VAR, Job, run_ranks, values
from ipc_random_faults import check_random
from ipc_reference import ALL_DTYPES
from ipc_table import SMALL_CHUNKS, whole_table
from ipc_workloads import busy

from ray_fracbackend.ipc import device_memory_support
from ray_fracbackend.ipc.device import memory
from ray_fracbackend.ipc.device.memory import DeviceMemory
from ray_fracbackend.ipc.device.runtime import CudaRuntime
from ray_fracbackend.ipc.protocol.local import LEADER
from ray_fracbackend.ipc.protocol.schedule import Action

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_DEVICE = {DEVICE_ENV_VAR: "cuda:0"}
SMALL = {**ON_DEVICE, **SMALL_CHUNKS}
# About half a second on a GPU of 2 GHz.
LONG_KERNEL_CYCLES = 1_000_000_000


def lane_of(pg: Any) -> Any:
    """The group's device memory, which must be in use."""
    lane = pg._device_side._lane
    assert lane is not None, pg.staged_reason
    return lane


def support(job: Job) -> tuple[str | None, bool]:
    """What the probe says, and whether it made a CUDA context."""
    reason = device_memory_support(0)
    return reason, torch._C._cuda_hasPrimaryContext(0)


def test_the_probe_finds_nothing_missing_and_makes_no_context() -> None:
    """A worker can be asked before it touches the device."""
    assert values(run_ranks(support, 1, limit_s=60)) == [(None, False)]


@pytest.mark.parametrize(
    ("size", "how"), [(1, "leader"), (2, "leader"), (3, "leader"), (3, "split"), (4, "leader"), (8, "leader")]
)
def test_every_collective_matches_the_reference(size: int, how: str) -> None:
    """Collectives, element types, operations and shapes, in several chunks; bitwise."""
    dtypes = ALL_DTYPES if size < 4 else [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    env = {**SMALL, "RAY_FRACBACKEND_IPC_DEVICE_REDUCE": how}
    for failures in values(run_ranks(whole_table, size, dtypes, limit_s=280, env=env)):
        assert failures == []


def random_sums(job: Job) -> list[str]:
    """Sums of random numbers from 4 KiB to 100 MiB with the default chunks, against the sum in rank order."""
    pg = device_group(job, "sums", job.rank, job.size, 60.0)
    bad = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for numel in (1024, 70_001, 1_000_003, 26_214_401):
            seeds = [zlib.crc32(f"{dtype}{numel}{r}".encode()) for r in range(job.size)]
            inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in seeds]
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            total = inputs[0].to(wide, copy=True)
            for tensor in inputs[1:]:
                total += tensor.to(wide)
            mine = inputs[job.rank].cuda(0)
            pg.allreduce([mine], options("Allreduce")).wait()
            if not torch.equal(mine.cpu(), total.to(dtype)):
                bad.append(f"{dtype} {numel}")
    lane_of(pg)
    return bad


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["leader", "split"])
def test_sums_of_random_numbers_are_bitwise_those_in_rank_order(size: int, how: str) -> None:
    """Nothing is added in another order or rounded in between."""
    env = {**ON_DEVICE, "RAY_FRACBACKEND_IPC_DEVICE_REDUCE": how}
    for bad in values(run_ranks(random_sums, size, limit_s=200, env=env)):
        assert bad == []


def long_kernel(job: Job, skip_waits: bool) -> tuple[list[bool], list[bool]]:
    """The last rank's data comes after a long kernel; which calls were over when issued, which results are right."""
    pg = device_group(job, "order", job.rank, job.size, 60.0)
    stream = torch.cuda.Stream()
    tensors, early = [torch.zeros(200_000, device="cuda:0") for _ in range(4)], []
    torch.cuda.synchronize()
    if skip_waits:
        DeviceMemory.wait = lambda self, ranks, kind, value: None  # type: ignore[method-assign]
    with torch.cuda.stream(stream):
        if job.rank == job.size - 1:
            torch.cuda._sleep(LONG_KERNEL_CYCLES)
        for number, tensor in enumerate(tensors):
            tensor.fill_(job.rank + 1.0 + number)
            work = pg.allreduce([tensor], options("Allreduce", asyncOp=number % 2 == 1))
            work.wait()
            event = torch.cuda.Event()
            event.record()
            early.append(event.query())
    torch.cuda.synchronize()
    size = job.size
    expected = [size * (size + 1) / 2 + size * number for number in range(4)]
    return early, [bool((tensor == value).all()) for tensor, value in zip(tensors, expected, strict=True)]


@pytest.mark.parametrize("size", [2, 4])
def test_streams_alone_order_the_ranks_behind_a_long_kernel(size: int) -> None:
    """All calls are issued while the kernel still runs, so no host waits for the device, and the results are right."""
    for early, right in values(run_ranks(long_kernel, size, False, limit_s=120, env=ON_DEVICE)):
        assert early == [False] * 4
        assert right == [True] * 4


def test_without_waits_the_same_gives_wrong_results() -> None:
    """So it is the waits that order, and not chance."""
    outcomes = values(run_ranks(long_kernel, 2, True, limit_s=120, env=ON_DEVICE))
    assert not all(right for _, rights in outcomes for right in rights)


def steady(job: Job, num_calls: int) -> tuple[int, int, int]:
    """Wrong checksums of many calls on one group; growth of this process's and of the device's used memory."""
    job.init()
    rng = random.Random(7)
    wrong, base, used = 0, 0, 0
    for number in range(num_calls):
        if number == num_calls // 5:
            torch.cuda.synchronize()
            dist.barrier()
            base, used = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
        numel, value = rng.choice([1, 1000, 100_000, 3_000_000]), number % 251
        tensor = torch.full((numel,), float(value * (job.rank + 1)), device="cuda:0")
        dist.all_reduce(tensor)
        if number % 7 == 0:
            wrong += not bool((tensor == value * job.size * (job.size + 1) / 2).all())
    torch.cuda.synchronize()
    dist.barrier()
    lane_of(dist.group.WORLD)
    return wrong, torch.cuda.memory_reserved() - base, used - torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("size", [2, 4])
def test_thousands_of_calls_are_exact_and_take_no_memory(size: int) -> None:
    """Checksums hold, and neither torch's allocator nor the device has less than after the first fifth."""
    for wrong, reserved, used in values(run_ranks(steady, size, 4000, limit_s=200, env=ON_DEVICE)):
        assert wrong == 0
        assert reserved <= 64 << 20
        assert used <= 256 << 20


def dropped(job: Job, keeps: bool) -> bool:
    """Rank 1 drops its tensor while the device still waits for rank 0, and its memory is used again; whether the sum is right."""
    if not keeps:
        CudaRuntime.keep = lambda *args: None  # type: ignore[method-assign]
    pg = device_group(job, "dropped", job.rank, job.size, 60.0)
    tensor = torch.ones(400_000, device="cuda:0")
    torch.cuda.synchronize()
    if job.rank == 0:
        torch.cuda._sleep(LONG_KERNEL_CYCLES)
    pg.allreduce([tensor], options("Allreduce", asyncOp=True))
    pg.barrier(options("Barrier")).wait()  # on the host: both calls are issued
    if job.rank == 1:
        del tensor
        _ = [torch.full((400_000,), 99.0, device="cuda:0") for _ in range(3)]
    pg.barrier(options("Barrier")).wait()
    torch.cuda.synchronize()
    return job.rank == 1 or bool((tensor == job.size).all())


def test_memory_of_a_call_is_not_reused_before_the_device_is_through() -> None:
    """Also where nobody holds its tensors any more; without a record of the stream the sum is wrong."""
    assert values(run_ranks(dropped, 2, True, limit_s=60, env=SMALL)) == [True, True]
    assert values(run_ranks(dropped, 2, False, limit_s=60, env=SMALL)) == [False, True]


@pytest.mark.parametrize("size", [2, 3])
def test_two_groups_at_once(size: int) -> None:
    """Overlapping asynchronous calls on two groups, each with a stream, memory and words of its own."""
    assert values(run_ranks(busy, size, 1500, limit_s=200, env=SMALL)) == [0] * size


def come_and_go(job: Job) -> list[int]:
    """Bytes of the device that are in use after each of some groups, which rank 1 leaves later than the others."""
    found = []
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    for number in range(4):
        pg = device_group(job, f"group{number}", job.rank, job.size, 60.0)
        torch.cuda.synchronize()
        if job.rank == 1:
            time.sleep(0.3)
        pg.shutdown()
        store.set(f"left{number}{job.rank}", "")
        store.wait([f"left{number}{rank}" for rank in range(job.size)])
        memory.free_retired()
        torch.cuda.empty_cache()  # torch keeps what a stream had
        store.set(f"freed{number}{job.rank}", "")
        store.wait([f"freed{number}{rank}" for rank in range(job.size)])
        unused, total = torch.cuda.mem_get_info()
        found.append(total - unused)
        store.set(f"seen{number}{job.rank}", "")
        store.wait([f"seen{number}{rank}" for rank in range(job.size)])
    return found


def test_groups_that_come_and_go_free_their_memory() -> None:
    """Each rank's block, once no rank has it mapped any more."""
    for first, *later in values(run_ranks(come_and_go, 3, limit_s=120, env=ON_DEVICE)):
        assert later == [first] * 3


STRUCK = [("all_reduce", action) for action in Action] + [("broadcast", Action.AWAIT), ("all_to_all", Action.TAKE)]


@pytest.mark.parametrize(("name", "action"), STRUCK)
def test_a_killed_rank_is_reported(name: str, action: Action) -> None:
    """Survivors raise, leave without waiting for the device, and nothing stays in /dev/shm."""
    check_signal(name, "kill", 20.0, {"PeerLostError", "GroupPoisonedError"}, SMALL, [action])


def test_a_stopped_rank_is_reported() -> None:
    """Survivors raise when the deadline has passed."""
    check_signal("all_reduce", "stop", 2.0, {"CollectiveTimeoutError", "GroupPoisonedError"}, SMALL, [Action.FOLD])


# Two to four ranks, each with other delays of the emulated device; a GPU knows no seed.
SIZES_AND_SEEDS = [(2, "1"), (3, "2"), (4, "3")]


@pytest.mark.full
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_struck_rank_is_reported_at_every_step(kind: str, size: int, seed: str) -> None:
    """A process that dies and one that stands still, wherever that is: all others end within their limit, and their device comes free."""
    expected = {"kill": ("PeerLostError", 20.0), "stop": ("CollectiveTimeoutError", 2.0)}
    error, timeout_s = expected[kind]
    env = {**SMALL, "CUDA_RIG_SEED": seed}
    check_signal("all_reduce", kind, timeout_s, {error, "GroupPoisonedError"}, env, survivors=size - 1, limit_s=400)


@pytest.mark.full
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
def test_an_exception_at_every_step_reaches_every_rank(size: int, seed: str) -> None:
    """The rank that failed raises its own error; the others raise it by name."""
    env = {**SMALL, "CUDA_RIG_SEED": seed}
    for rank, reports in enumerate(values(run_ranks(struck_by_exception, size, ["all_reduce"], limit_s=300, env=env))):
        for name, step, error_type, text, _ in reports:
            assert "injected" in text, (name, step, error_type, text)
            struck = LEADER if step == "FOLD" else size - 1
            assert error_type == ("RuntimeError" if rank == struck else "GroupPoisonedError"), (name, step, text)


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_in_random_schedules(seed: int) -> None:
    """Whatever breaks whenever, every surviving rank raises soon."""
    check_random(seed, "device", SMALL)


SURVIVOR = """
import os, signal, sys, time, torch, torch.distributed as dist
import ray_fracbackend.ipc
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
dist.init_process_group("ipc", store=store, rank=rank, world_size=2)
x = torch.ones(1_000_000, device="cuda")
dist.all_reduce(x)
if rank == 1:
    torch.cuda._sleep(2_000_000_000)
    dist.all_reduce(x, async_op=True)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dist.all_reduce(x)
except RuntimeError as error:
    print(type(error).__name__, flush=True)
    sys.exit(7)
"""


def run_survivor(program: str) -> tuple[int, str, str]:
    """Exit code and output of rank 0, whose peer is killed while its kernels run."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, "-c", program, str(rank), str(store.port)] for rank in (0, 1)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(c, env=env, stdout=pipe, stderr=pipe, text=True) for c in commands]
    try:
        output = processes[0].communicate(timeout=120)
        assert processes[1].wait(timeout=10) == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
    return processes[0].returncode, *output


def test_a_survivor_process_ends_by_itself() -> None:
    """With a peer killed while its kernels run, the other's interpreter and CUDA still come down in bounded time."""
    code, output, _ = run_survivor(SURVIVOR)
    assert code == 7
    assert "PeerLostError" in output or "GroupPoisonedError" in output


def test_a_survivor_that_waits_for_its_device_ends() -> None:
    """What the device computes once a peer has died is unknown, and a wait for it may never end: the process says so and ends."""
    program = SURVIVOR.replace(
        "        dist.all_reduce(x)\nexcept", "        dist.all_reduce(x)\n        x.cpu()\nexcept"
    )
    assert program != SURVIVOR
    code, _, errors = run_survivor(program)
    assert code == -signal.SIGABRT
    assert "ray_fracbackend: rank 1 (pid " in errors
    assert "Ending this process" in errors


def leaves_the_other_group(job: Job) -> tuple[str, bool, float]:
    """Ranks 0 and 1 in a group that rank 2 leaves stuck, and in one of their own: its error, their sum, seconds of both shutdowns."""
    pg = device_group(job, "three", job.rank, 3, 60.0)
    own = device_group(job, "two", job.rank, 2, 60.0) if job.rank < 2 else None
    tensor = torch.ones(1_000_000, device="cuda:0")
    torch.cuda.synchronize()
    if own is None:
        torch.cuda._sleep(4 * LONG_KERNEL_CYCLES)
    pg.allreduce([tensor], options("Allreduce", asyncOp=True))
    pg.barrier(options("Barrier")).wait()  # on the host: all have issued their calls
    if own is None:
        strike("kill")
    error = error_of(lambda: [pg.barrier(options("Barrier")).wait() for _ in range(1000)])[0]
    other = torch.ones(1000, device="cuda:0")
    own.allreduce([other], options("Allreduce")).wait()
    is_right = bool((other == 2).all())
    started = time.monotonic()
    own.shutdown()
    pg.shutdown()
    return error, is_right, time.monotonic() - started


def test_a_group_beside_a_stuck_one_is_left_in_time() -> None:
    """Freeing and unmapping its memory would wait for all streams of the process, one of which may never go on."""
    outcomes = run_ranks(leaves_the_other_group, 3, limit_s=90, env=SMALL, needed=2)
    for error, is_right, seconds in values(outcomes[:2]):
        assert error in ("PeerLostError", "GroupPoisonedError")
        assert is_right
        assert seconds < 30


def train(job: Job, backend: str) -> list[torch.Tensor]:
    """A few steps under DDP on the device, with compressed buckets at the end; losses and weights."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    job.init(backend)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(0), bucket_cap_mb=0.3)
    if backend == "ipc":
        lane_of(dist.group.WORLD)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(12):
        if step == 9:
            net.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)
        generator = torch.Generator().manual_seed(100 * job.rank + step)
        x = torch.randn(64, 256, generator=generator).cuda(0)
        loss = (net(x) - x.sin()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [torch.stack(losses), *(p.detach().cpu() for p in net.parameters())]


def test_ddp_trains_to_the_same_loss_as_on_gloo() -> None:
    """With two ranks a sum has one order, so only kernels' own rounding may differ."""
    ours, theirs = (values(run_ranks(train, 2, name, limit_s=120, env=ON_DEVICE)) for name in ("ipc", "gloo"))
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours[0][1:], ours[1][1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:64"])
def test_the_allocators_configuration_does_not_matter(setting: str) -> None:
    """The shared memory does not come from torch's allocator, which reads its configuration when torch is imported."""
    env = {**SMALL, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    assert values(run_ranks(busy, 2, 100, limit_s=120, env=env, fresh=True)) == [0, 0]


def captured(job: Job) -> str:
    """What a collective in a graph capture says."""
    pg = bare_group(job, "graph", job.rank, job.size, 20.0)
    x = torch.ones(8, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        text = error_of(lambda: pg.allreduce([x], options("Allreduce")).wait())[1]
        x.add_(1)
        graph.capture_end()
    CALLS["all_reduce"](pg).wait()
    return text


def test_a_collective_cannot_be_captured_and_says_so() -> None:
    """The error comes before anything is issued, so capture and group both go on."""
    for text in values(run_ranks(captured, 2, limit_s=60, env=ON_DEVICE)):
        assert "cannot be captured in a CUDA graph" in text


def two_names(job: Job) -> bool:
    """Ranks that know one device by different indices; whether a sum is right."""
    index = torch.cuda.device_count() - 1
    os.environ[DEVICE_ENV_VAR] = f"cuda:{index}"
    pg = bare_group(job, "names", job.rank, job.size, 30.0)
    x = torch.full((50_000,), job.rank + 1.0, device=f"cuda:{index}")
    pg.allreduce([x], options("Allreduce")).wait()
    lane_of(pg)
    return bool((x == 3).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_peers_are_matched_by_uuid() -> None:
    """One rank sees devices 0 and 1, the other only the second, as its device 0."""
    env = lambda rank: {**ON_DEVICE, "CUDA_VISIBLE_DEVICES": "0,1" if rank == 0 else "1"}  # noqa: E731
    assert values(run_ranks(two_names, 2, limit_s=60, env=env, fresh=True)) == [True] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_collective_is_right_between_devices() -> None:
    """Four ranks on two devices, interleaved: staged."""
    told = {"IPC_TEST_STAGED": "the ranks are on 2 devices"}
    env = lambda rank: {**SMALL, **told, DEVICE_ENV_VAR: f"cuda:{rank % 2}"}  # noqa: E731
    for failures in values(run_ranks(whole_table, 4, [torch.float32, torch.bool], limit_s=200, env=env)):
        assert failures == []


def idle_while_a_peer_is_late(job: Job) -> bool:
    """A rank whose peer comes a second late; the sum."""
    pg = device_group(job, "late", job.rank, job.size, 30.0)
    x = torch.ones(1000, device="cuda:0")
    if job.rank == 1:
        time.sleep(1.0)
    pg.allreduce([x], options("Allreduce")).wait()
    return bool((x == 2).all())


def test_a_late_rank_is_waited_for() -> None:
    """The host waits for its peer; no kernel of this rank runs meanwhile."""
    assert values(run_ranks(idle_while_a_peer_is_late, 2, limit_s=60, env=ON_DEVICE)) == [True, True]
