"""The staged backend on a real device: exact results, order behind long kernels, faults, DDP and FSDP2.

Needs a CUDA device, torch and pytest; nothing else. All ranks share device 0.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ipc_calls import DEVICE_CALLS, bare_group
from ipc_harness import DEVICE_ENV_VAR, Job, on_ranks, run_ranks, values
from ipc_memories import check_signal, staged_group
from ipc_reference import ALL_DTYPES
from ipc_table import SMALL_CHUNKS, check_table
from ipc_workloads import busy
from test_gpu_ipc import long_kernel, train

from ray_fracbackend import verify_process_group
from ray_fracbackend.ipc.device.runtime import AcceleratorRuntime

ON_DEVICE = {DEVICE_ENV_VAR: "cuda:0", "IPC_TEST_BACKEND": "staged"}
SMALL = {**SMALL_CHUNKS, "RAY_FRACBACKEND_STAGED_CHUNK_BYTES": "65536"}
WAYS = {
    "over ipc": {**ON_DEVICE, "IPC_TEST_STAGED": "over shared host memory"},
    "over Gloo": {**ON_DEVICE, "IPC_TEST_STAGED": "over Gloo: ", "RAY_FRACBACKEND_STAGED_INNER": "gloo"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_matches_the_reference(size: int, way: str) -> None:
    """Collectives, element types, operations and shapes, in several chunks; bitwise, AVG too: the host divides."""
    dtypes = ALL_DTYPES if size < 3 else [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    check_table(size, dtypes, True, {**WAYS[way], **SMALL})


@pytest.mark.parametrize("way", WAYS)
def test_a_call_behind_a_long_kernel_waits_for_it(way: str) -> None:
    """And what the caller does next waits for the copy back."""
    assert values(run_ranks(long_kernel, 2, staged_group, False, limit_s=120, env=WAYS[way])) == [[True] * 4] * 2


def test_without_the_wait_the_same_gives_wrong_results() -> None:
    """So it is the wait, and not chance."""
    assert not all(map(all, values(run_ranks(long_kernel, 2, staged_group, True, limit_s=120, env=WAYS["over ipc"]))))


@on_ranks(2, env=WAYS["over ipc"])
def test_buffers_are_pinned(job: Job) -> None:
    """Copies to others would block the host. Buffers that the device is through with are used again."""
    pinned, buffers = AcceleratorRuntime.pinned, []

    def noted(*args):
        buffers.append(pinned(*args))
        return buffers[-1]

    AcceleratorRuntime.pinned = noted
    pg, addresses = bare_group(job, "pinned", job.rank, job.size, 60.0), set()
    for _ in range(50):
        DEVICE_CALLS["all_reduce"](pg).wait()
        assert buffers
        assert all(buffer.is_pinned() for buffer in buffers)
        addresses |= {buffer.data_ptr() for buffer in buffers}
        buffers.clear()
    # Two buffers, of which the copies back of the call before may still use others.
    assert len(addresses) <= 6


@pytest.mark.parametrize("way", WAYS)
def test_two_groups_at_once(way: str) -> None:
    """Overlapping asynchronous calls on two groups, whose buffers come from one allocator."""
    values(run_ranks(busy, 2, 1000, limit_s=200, env={**WAYS[way], **SMALL}))


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("way", WAYS)
def test_training_ends_with_the_weights_of_one_process(way: str, how: str) -> None:
    """Two ranks with half of the batch each, against every rank with the whole batch by itself."""
    ours = values(run_ranks(train, 2, "cpu:gloo,cuda:staged", how, limit_s=120, env=WAYS[way]))
    alone = values(run_ranks(train, 2, None, "alone", limit_s=120, env=ON_DEVICE))
    for mine, other in zip(ours, alone, strict=True):
        torch.testing.assert_close(mine[:-1], other[:-1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_is_reported_and_leaves_no_stream_stuck(way: str) -> None:
    """Survivors raise at once, and their device is free."""
    check_signal("all_reduce", "kill", {**WAYS[way], **SMALL}, [("begin", 1)], "staged")


@pytest.mark.parametrize("way", WAYS)
@on_ranks(3, env=lambda rank, way: WAYS[way])
def test_point_to_point(job: Job, way: str) -> None:
    """Through the host, in each form of torch's; plain Gloo has none for CUDA tensors. A receive without an answer ends in time."""
    job.init("cpu:gloo,cuda:staged")
    after, before = (job.rank + 1) % job.size, (job.rank - 1) % job.size
    received = [torch.zeros(2, 3, device="cuda:0").t() for _ in range(3)]
    own = torch.arange(6.0, device="cuda:0").view(2, 3).t() + 10 * job.rank
    ops = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, received[0], before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if job.rank == 0:
        dist.send(own, 1, tag=5)
        assert dist.recv(received[1]) == 1
        dist.recv(received[2], 2, tag=7)
    elif job.rank == 1:
        dist.recv(received[1], 0, tag=5)
        dist.send(own, 0)
    else:
        dist.send(own, 0, tag=7)
    for tensor, sender in zip(received, [before, *((1, 2), (0,), ())[job.rank]], strict=False):
        assert tensor.tolist() == (torch.arange(6.0).view(2, 3).t() + 10 * sender).tolist()
    pending = dist.irecv(received[0].clone(), before, tag=99)
    with pytest.raises(RuntimeError):
        pending.wait(timedelta(seconds=0.2))
    assert not pending.is_completed()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, limit_s=60, env=lambda rank, way: WAYS[way])
def test_verification_takes_tensors_of_the_device(job: Job, way: str) -> None:
    """And says how they travelled."""
    job.init("cpu:gloo,cuda:staged")
    torch.cuda.set_device(0)
    result = verify_process_group(timeout_s=60)
    dist.destroy_process_group()
    assert result.device == "cuda:0"
    assert str(result.path).startswith(f"staged through host memory ({WAYS[way]['IPC_TEST_STAGED']}")
