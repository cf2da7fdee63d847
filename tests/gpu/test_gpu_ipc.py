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
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ipc_calls import CALLS, bare_group, error_of, options, strike
from ipc_harness import DEVICE_ENV_VAR, Job, on_ranks, run_ranks, values
from ipc_memories import LOST, check_exceptions, check_random, check_signal, device_group, staged_group
from ipc_reference import ALL_DTYPES
from ipc_table import SMALL_CHUNKS, check_table
from ipc_workloads import busy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from ray_fracbackend.ipc import device_memory_support
from ray_fracbackend.ipc.device import staged
from ray_fracbackend.ipc.device.driver import GRANULARITY_BYTES, CudaRuntime, DriverError
from ray_fracbackend.ipc.device.memory import DeviceMemory, block_bytes
from ray_fracbackend.ipc.knobs import device_chunk_bytes
from ray_fracbackend.ipc.protocol.schedule import Action

ON_DEVICE = {DEVICE_ENV_VAR: "cuda:0"}
SMALL = {**ON_DEVICE, **SMALL_CHUNKS}
# A rank whose host is inside a launch behind a lost rank is ended: test_a_survivor_whose_host_is_inside_a_launch_ends in tests/ipc.
FAULTY = {**SMALL, "CUDA_RIG_BLOCKING_LAUNCHES": "0"}
# About half a second on a GPU of 2 GHz.
LONG_KERNEL_CYCLES = 1_000_000_000
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@on_ranks(1)
def test_the_probe_finds_nothing_missing_and_makes_no_context(job: Job) -> None:
    """A worker can be asked before it touches the device."""
    assert device_memory_support(0) is None
    assert not torch._C._cuda_hasPrimaryContext(0)


@on_ranks(1)
def test_memory_of_the_driver(job: Job) -> None:
    """A block has whole granules, so its handle opens no other data; too much is a MemoryError, and a refusal a DriverError."""
    index = torch.cuda.device_count() - 1
    runtime = CudaRuntime(torch.device("cuda", index))
    first, second = runtime.allocate(1), runtime.allocate(1)
    assert first.bytes.nbytes == GRANULARITY_BYTES <= abs(first.pointer - second.pointer)
    with pytest.raises(MemoryError):
        runtime.allocate(1 << 50)
    with pytest.raises(DriverError):
        runtime.open(bytes(64), 1)
    assert torch.cuda.current_device() == 0
    assert runtime.uuid() == str(torch.cuda.get_device_properties(index).uuid)
    runtime.release(first)
    runtime.release(second)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_collective_matches_the_reference(size: int) -> None:
    """Collectives, element types, operations and shapes, in several chunks; bitwise."""
    dtypes = ALL_DTYPES if size < 4 else [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    check_table(size, dtypes, True, SMALL)


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(limit_s=200, env=ON_DEVICE)
def test_sums_of_random_numbers_are_bitwise_those_in_rank_order(job: Job, size: int) -> None:
    """From 4 KiB to 100 MiB with the default chunks: nothing is added in another order or rounded in between."""
    pg = device_group(job, "sums", job.rank, job.size, 60.0)
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
            assert torch.equal(mine.cpu(), total.to(dtype)), f"{dtype} {numel}"


def long_kernel(job: Job, group: Callable[..., Any], skip_waits: bool) -> list[bool]:
    """The last rank's data comes after a long kernel, during which all calls are issued; return which results are right."""
    pg = group(job, "order", job.rank, job.size, 60.0)
    tensors = [torch.zeros(200_000, device="cuda:0").fill_(1).mul_(2) for _ in range(4)]
    torch.cuda._sleep(1)  # the first launch of a kernel may wait for the device
    torch.cuda.synchronize()
    if skip_waits:
        DeviceMemory.after = lambda self, ranks, kind, value: None  # type: ignore[method-assign]
        staged._wait_for = lambda event, terms: None
    with torch.cuda.stream(torch.cuda.Stream()):
        if job.rank == job.size - 1:
            torch.cuda._sleep(LONG_KERNEL_CYCLES)
        for number, tensor in enumerate(tensors):
            tensor.fill_(job.rank + 1.0 + number)
            pg.allreduce([tensor], options("Allreduce", asyncOp=number % 2 == 1)).wait()
            tensor.mul_(2)
            event = torch.cuda.Event()
            event.record()
            assert skip_waits or group is staged_group or not event.query(), "the host has waited for the device"
    torch.cuda.synchronize()
    size = job.size
    expected = [size * (size + 1) + 2 * size * number for number in range(4)]
    return [bool((tensor == value).all()) for tensor, value in zip(tensors, expected, strict=True)]


@pytest.mark.parametrize("size", [2, 4])
def test_streams_order_the_ranks_behind_a_long_kernel(size: int) -> None:
    """No host waits for the device, and the results are right; without the waits of the streams they are not."""
    assert values(run_ranks(long_kernel, size, device_group, False, env=ON_DEVICE)) == [[True] * 4] * size
    if size == 2:
        assert not all(map(all, values(run_ranks(long_kernel, 2, device_group, True, env=ON_DEVICE))))


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(limit_s=200, env=ON_DEVICE)
def test_thousands_of_calls_are_exact_and_take_no_memory(job: Job, size: int) -> None:
    """Neither torch's allocator nor the device has less than after the first fifth."""
    job.init()
    rng, num_calls = random.Random(7), 4000
    for number in range(num_calls):
        if number == num_calls // 5:
            torch.cuda.synchronize()
            dist.barrier()
            base, unused = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
        numel, value = rng.choice([1, 1000, 100_000, 3_000_000]), number % 251
        tensor = torch.full((numel,), float(value * (job.rank + 1)), device="cuda:0")
        dist.all_reduce(tensor)
        assert number % 7 or bool((tensor == value * job.size * (job.size + 1) / 2).all())
    torch.cuda.synchronize()
    dist.barrier()
    assert dist.group.WORLD._device_side._lane is not None  # type: ignore[union-attr]
    assert torch.cuda.memory_reserved() - base <= 64 << 20
    assert unused - torch.cuda.mem_get_info()[0] <= 256 << 20


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


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_of_a_call_is_not_reused_before_the_device_is_through(keeps: bool) -> None:
    """Also where nobody holds its tensors any more; without a record of the stream the sum is wrong."""
    assert values(run_ranks(dropped, 2, keeps, limit_s=60, env=SMALL)) == [keeps, True]


@pytest.mark.parametrize("size", [2, 3])
def test_two_groups_at_once(size: int) -> None:
    """Overlapping asynchronous calls on two groups, each with a stream, memory and words of its own."""
    values(run_ranks(busy, size, 1500, limit_s=200, env=SMALL))


@pytest.mark.parametrize("size", [2, 3])
def test_two_groups_on_one_hardware_queue_with_launches_that_block_the_host(size: int) -> None:
    """Each rank issues the calls of the groups in another order; a wait that is issued before its write would end no more.

    CUDA reads the first variable too. The emulated runtime's launches wait for the device, as the first one of a kernel may.
    """
    env = {**SMALL, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_RIG_BLOCKING_LAUNCHES": "1"}
    values(run_ranks(busy, size, 500, limit_s=90, env=env))


@on_ranks(3, env=ON_DEVICE)
def test_groups_that_come_and_go_free_their_memory(job: Job) -> None:
    """The first rank's block, which waits for the others; rank 1 leaves later."""
    store, used = job.store(), []

    def meet(what: str) -> None:
        store.set(f"{what} {job.rank}", "")
        store.wait([f"{what} {rank}" for rank in range(job.size)])

    for number in range(4):
        pg = device_group(job, f"group{number}", job.rank, job.size, 60.0)
        torch.cuda.synchronize()
        if job.rank == 1:
            time.sleep(0.3)
        pg.shutdown()
        meet(f"left {number}")
        torch.cuda.empty_cache()  # torch keeps what a stream had
        meet(f"freed {number}")
        unused, total = torch.cuda.mem_get_info()
        used.append(total - unused)
        meet(f"seen {number}")
    # Other processes and kernels that CUDA loads late take some memory too, but much less than a group.
    assert max(used) - min(used) < block_bytes(device_chunk_bytes(), job.size)[0] / 2


@pytest.mark.parametrize(
    ("name", "kind", "action"),
    [
        *(("all_reduce", "kill", action) for action in Action),
        ("broadcast", "kill", Action.AWAIT),
        ("all_to_all", "kill", Action.TAKE),
        ("all_reduce", "stop", Action.FOLD),
    ],
)
def test_a_struck_rank_is_reported(name: str, kind: str, action: Action) -> None:
    """Survivors raise, leave without waiting for the device, and nothing stays in /dev/shm."""
    check_signal(name, kind, FAULTY, [action])


# Two to four ranks, each with other delays of the emulated device; a GPU knows no seed.
SIZES_AND_SEEDS = [(2, "1"), (3, "2"), (4, "3")]


@pytest.mark.full
@pytest.mark.parametrize(("size", "seed"), SIZES_AND_SEEDS)
@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_a_struck_rank_is_reported_at_every_step(kind: str, size: int, seed: str) -> None:
    """A process that dies, one that stands still, one that fails, wherever that is: all others end in time, and their device comes free."""
    env = {**FAULTY, "CUDA_RIG_SEED": seed}
    if kind == "raise":
        check_exceptions(size, env, limit_s=300)
    else:
        check_signal("all_reduce", kind, env, survivors=size - 1, limit_s=400)


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_in_random_schedules(seed: int) -> None:
    """Whatever breaks whenever, every surviving rank raises soon."""
    check_random(seed, "device", FAULTY)


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
        if sys.argv[3] == "1":
            x.cpu()
except RuntimeError as error:
    print(type(error).__name__, flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize("waits_for_device", [False, True])
def test_a_survivor_process_ends(waits_for_device: bool) -> None:
    """With a peer killed while its kernels run, the other's interpreter and CUDA still come down in bounded time.

    What the device computes then is unknown, and a wait for it may never end: a process that waits for it says so and ends.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [
        [sys.executable, "-c", SURVIVOR, str(rank), str(store.port), str(int(waits_for_device))] for rank in (0, 1)
    ]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(c, env=env, stdout=pipe, stderr=pipe, text=True) for c in commands]
    try:
        output, errors = processes[0].communicate(timeout=120)
        assert processes[1].wait(timeout=10) == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
    if waits_for_device:
        assert processes[0].returncode == -signal.SIGABRT
        assert "ray_fracbackend: rank 1 (pid " in errors
        assert "Ending this process" in errors
    else:
        assert processes[0].returncode == 7
        assert output.strip() in LOST


@on_ranks(3, limit_s=90, env=SMALL, needed=2)
def test_a_group_beside_a_stuck_one_is_left_in_time(job: Job) -> None:
    """Rank 2 leaves a group of three stuck; freeing and unmapping memory would wait for all streams of the process."""
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
    assert error in LOST
    other = torch.ones(1000, device="cuda:0")
    own.allreduce([other], options("Allreduce")).wait()
    assert bool((other == 2).all())
    started = time.monotonic()
    own.shutdown()
    pg.shutdown()
    assert time.monotonic() - started < 30


def train(job: Job, backend: str | None, how: str) -> list[torch.Tensor]:
    """Some steps under DDP, also with compressed buckets at the end, under FSDP2, or alone with the whole batch; weights and losses.

    Without a backend in the group that there is.
    """
    if backend is not None:
        job.init(backend)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    net: Any = torch.nn.Sequential(*layers).cuda(0)
    if how.startswith("ddp"):
        net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.3)
    elif how == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # late, because it takes seconds

        mesh = init_device_mesh("cuda", (job.size,))
        for layer in net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    assert backend != "ipc" or dist.group.WORLD._device_side._lane is not None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(12):
        if how == "ddp, compressed" and step == 9:
            net.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)
        ranks = range(job.size) if how == "alone" else [job.rank]
        inputs = [torch.randn(64, 256, generator=torch.Generator().manual_seed(100 * r + step)) for r in ranks]
        x = torch.cat(inputs).cuda(0)
        loss = (net(x) - x.sin()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in net.parameters()]
    return [*weights, torch.stack(losses)]


def test_ddp_trains_to_the_same_loss_as_on_gloo() -> None:
    """With two ranks a sum has one order, so only kernels' own rounding may differ."""
    how = "ddp, compressed"
    ours, theirs = (values(run_ranks(train, 2, name, how, limit_s=120, env=ON_DEVICE)) for name in ("ipc", "gloo"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[0][:-1], ours[1][:-1], rtol=0, atol=0)


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:64"])
def test_the_allocators_configuration_does_not_matter(setting: str) -> None:
    """The shared memory does not come from torch's allocator, which reads its configuration when torch is imported."""
    env = {**SMALL, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    values(run_ranks(busy, 2, 100, env=env, fresh=True))


@on_ranks(2, env=ON_DEVICE)
def test_a_collective_cannot_be_captured_and_says_so(job: Job) -> None:
    """The error comes before anything is issued, so capture and group both go on."""
    pg = bare_group(job, "graph", job.rank, job.size, 20.0)
    x = torch.ones(8, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
            pg.allreduce([x], options("Allreduce")).wait()
        x.add_(1)
        graph.capture_end()
    CALLS["all_reduce"](pg).wait()


@two_devices
@on_ranks(2, env=lambda rank: {**ON_DEVICE, "CUDA_VISIBLE_DEVICES": "0,1" if rank == 0 else "1"}, fresh=True)
def test_peers_are_matched_by_uuid(job: Job) -> None:
    """One rank sees devices 0 and 1, the other only the second, as its device 0."""
    index = torch.cuda.device_count() - 1
    os.environ[DEVICE_ENV_VAR] = f"cuda:{index}"
    pg = device_group(job, "names", job.rank, job.size, 30.0)
    x = torch.full((50_000,), job.rank + 1.0, device=f"cuda:{index}")
    pg.allreduce([x], options("Allreduce")).wait()
    assert bool((x == 3).all())


@two_devices
def test_every_collective_is_right_between_devices() -> None:
    """Four ranks on two devices, interleaved: staged."""
    told = {"IPC_TEST_STAGED": "the ranks are on 2 devices"}
    env = lambda rank: {**SMALL, **told, DEVICE_ENV_VAR: f"cuda:{rank % 2}"}  # noqa: E731
    check_table(4, [torch.float32, torch.bool], True, env)
