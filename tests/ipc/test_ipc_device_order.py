"""Order by events only: the device is held until every host has issued all its work."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu, FakeStream
from ipc_calls import options
from ipc_harness import Job, on_ranks
from ipc_memories import device_group
from ipc_table import SMALL_CHUNKS

from ray_fracbackend.ipc._torch import RedOpType
from ray_fracbackend.ipc.device.memory import DeviceMemory, block_bytes
from ray_fracbackend.ipc.device.timeline import Timeline, timeline_bytes
from ray_fracbackend.ipc.host.arena import create_arena
from ray_fracbackend.ipc.host.liveness import Peer, start_time
from ray_fracbackend.ipc.protocol.control import control_bytes
from ray_fracbackend.ipc.protocol.description import Terms, describe_call
from ray_fracbackend.ipc.protocol.engine import Engine
from ray_fracbackend.ipc.protocol.local import LocalCollectives
from ray_fracbackend.ipc.protocol.reductions import Reduction
from ray_fracbackend.ipc.protocol.schedule import READ

CHUNK_BYTES = 65536
NUM_CALLS = 6


class Ranks:
    """Ranks that are threads of this process, on one fake device; the collectives and the transport are the real ones."""

    def __init__(self, gpu: FakeGpu, num_ranks: int, one_pass_bytes: int) -> None:
        FakeCuda.gpu = gpu
        self.runtime = FakeCuda(torch.device("cpu"))
        self.streams = [FakeStream(gpu) for _ in range(num_ranks)]
        arena, name = create_arena(control_bytes(num_ranks) + timeline_bytes(num_ranks))
        os.close(name.fd)
        block = self.runtime.allocate(block_bytes(CHUNK_BYTES, num_ranks)[0])
        peers = [Peer(os.getpid(), start_time(os.getpid()))] * num_ranks
        self.local = []
        for r in range(num_ranks):
            timeline = Timeline(self.runtime, self.streams[r], arena, control_bytes(num_ranks), r, num_ranks)
            memory = DeviceMemory(block, timeline, CHUNK_BYTES, r, num_ranks)
            engine = Engine(arena, r, peers, [f"rank {i}" for i in range(num_ranks)], memory)
            self.local.append(LocalCollectives(engine, one_pass_bytes))


def program(ranks: Ranks, rank: int, seed: int) -> list[tuple[torch.Tensor, float]]:
    """Issue random collectives on the rank's stream; return the results, which are not complete, and the correct ones."""
    shared, size = random.Random(seed), len(ranks.local)
    local, results = ranks.local[rank], []
    rank_sum = size * (size + 1) / 2
    reduction = Reduction(torch.float32, RedOpType.SUM, size)
    with ranks.runtime.on(ranks.streams[rank]):
        for number in range(NUM_CALLS):
            kind = shared.choice(["all_reduce", "broadcast", "all_gather", "reduce", "reduce_scatter"])
            numel, root = shared.choice([3, 1000, 30_000, 50_001]), shared.randrange(size)
            tensor = torch.empty(numel)
            tensor.copy_(torch.full((numel,), (rank + 1.0) * (number + 1)))
            terms = Terms.within(describe_call(f"{kind} {number}"), 20)
            if kind == "all_reduce":
                local.reduce(tensor, None, reduction, terms)
                results.append((tensor, rank_sum * (number + 1)))
            elif kind == "reduce":
                local.reduce(tensor, root, reduction, terms)
                results.append((tensor, (rank_sum if rank == root else rank + 1) * (number + 1)))
            elif kind == "broadcast":
                local.broadcast(tensor, root, terms)
                results.append((tensor, (root + 1.0) * (number + 1)))
            elif kind == "all_gather":
                outs = [torch.empty(numel) for _ in range(size)]
                local.gather(tensor, outs, None, terms)
                results += [(out, (r + 1.0) * (number + 1)) for r, out in enumerate(outs)]
            else:
                out = torch.empty(numel)
                local.reduce_scatter([tensor] * size, out, reduction, terms)
                results.append((out, rank_sum * (number + 1)))
    return results


def check_program(num_ranks: int, one_pass_bytes: int, seed: int) -> None:
    """Run a program on all ranks with the device held, then release it; all results must be right."""
    with contextlib.closing(FakeGpu(seed)) as gpu:
        gpu.pause_s, gpu.stickiness = 0.0, [0.0, 0.9, 0.99][seed % 3]
        gpu.running.clear()
        ranks = Ranks(gpu, num_ranks, one_pass_bytes)
        with ThreadPoolExecutor(num_ranks) as pool:
            runs = [pool.submit(program, ranks, rank, seed) for rank in range(num_ranks)]
            _, waiting = wait(runs, 30)
            gpu.running.set()
        assert not waiting, "a host waits for the device"
        for stream in ranks.streams:
            stream.synchronize()
        assert all(bool((tensor == value).all()) for run in runs for tensor, value in run.result())
    fake_cuda.close_names()


@pytest.mark.parametrize("one_pass_bytes", [1 << 40, 4096])
@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", range(12))
def test_results_are_exact_in_whatever_order_the_device_works(num_ranks: int, one_pass_bytes: int, seed: int) -> None:
    """No host waits for the device, and random orders that respect streams and events have exact results."""
    check_program(num_ranks, one_pass_bytes, seed)


def test_a_stream_waits_for_all_that_is_counted() -> None:
    """A peer goes on between any two reads of its counters."""
    numbers, waits = itertools.count(1), []
    words = type("Words", (), {"__getitem__": lambda self, index: next(numbers)})()
    block, timeline = SimpleNamespace(bytes=torch.empty(block_bytes(64, 2)[0])), SimpleNamespace(wait=waits.append)
    memory = DeviceMemory(block, timeline, 64, 0, 2)  # type: ignore[arg-type]
    memory.attach(words, [0, 0])
    for count in range(1, 20):
        memory.after([1], READ, count)
        assert waits[-1][1] >= count


@pytest.mark.parametrize("is_async", [False, True])
@on_ranks(2, env={**SMALL_CHUNKS, "FAKE_CUDA_SEED": "3"})
def test_a_call_waits_for_its_callers_stream_and_the_stream_for_the_call(job: Job, is_async: bool) -> None:
    """Create, reduce and use a tensor on a caller's stream while the device does nothing: neither wait blocks the host."""
    pg = device_group(job, "streams", job.rank, job.size, 60.0)
    gpu, caller = FakeCuda.gpu, FakeStream(FakeCuda.gpu)
    runtime = FakeCuda(torch.device("cpu"))
    caller.synchronize()
    gpu.stickiness = 0.9
    gpu.running.clear()
    results = []
    for number in range(10):
        tensor, result = torch.empty(9000), torch.empty(9000)
        with runtime.on(caller):
            tensor.copy_(torch.full((9000,), float(number + job.rank)))
            work = pg.allreduce([tensor], options("Allreduce", asyncOp=is_async))
            if is_async:
                work.wait()
            torch.mul(tensor, 2.0, out=result)
        results.append(result)
    gpu.running.set()
    caller.synchronize()
    assert all(bool((result == 2.0 * (2 * number + 1)).all()) for number, result in enumerate(results))
