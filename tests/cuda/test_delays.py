"""Collectives compute the same whatever the device's delays are: with three seeds, and with kernels that never run late."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from ipc_harness import BACKEND_ENV_VAR, DEVICE_ENV_VAR, run_ranks, values
from ipc_table import SMALL_CHUNKS, Run, cases_of, pairwise

from tests.cuda.emulated import is_common
from tests.gpu.test_gpu_ipc import train

DELAYS = [{"CUDA_RIG_SEED": "1"}, {"CUDA_RIG_SEED": "2"}, {"CUDA_RIG_SEED": "3"}, {"CUDA_RIG_DELAY_US": "0"}]
ONE_GPU = {
    DEVICE_ENV_VAR: "cuda:0",
    "CUDA_RIG_NCCL": "2.30.7",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    **SMALL_CHUNKS,
}


def digest(*tensors):
    """Of the bits of tensors on the device."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def overlapping_sums(job):
    """Sums of random numbers, issued without a wait in between on two streams."""
    generator = torch.Generator().manual_seed(job.rank)
    tensors = [torch.randn(numel, generator=generator).cuda() for numel in (5, 1024, 70_001, 400_003) * 6]
    streams, works = (torch.cuda.current_stream(), torch.cuda.Stream()), []
    streams[1].wait_stream(streams[0])
    for number, tensor in enumerate(tensors):
        with torch.cuda.stream(streams[number % 2]):
            tensor.mul_(1.5).sin_()
            works.append(dist.all_reduce(tensor, async_op=True))
    for number, work in enumerate(works):
        with torch.cuda.stream(streams[number % 2]):
            work.wait()
    torch.cuda.synchronize()
    return tensors


def num_late_kernels():
    """How many of 50 kernels still ran when their call had returned.

    On a stream of their own: on others another thread can record an event between the launch and the query.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor, num_late = torch.zeros(5, device="cuda"), 0
        for _ in range(50):
            torch.cuda.synchronize()
            tensor.add_(1)
            num_late += not torch.cuda.current_stream().query()
    return num_late


def everything(job, is_ours):
    """Digest of each case of the table, of overlapping sums and of training; and how many kernels ran late."""
    job.init()
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool] if is_ours else [torch.float32, torch.int64]
    cases = cases_of(job.size, dtypes)
    if not is_ours:
        cases = [case for case in cases if is_common(case)]
    cases = pairwise(cases, 0)
    found = {str(case): digest(*Run(case, dist.group.WORLD).results()) for case in cases}
    found["sums"], found["training"] = digest(*overlapping_sums(job)), digest(*train(job, None, "ddp"))
    return found, num_late_kernels()


@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [("ipc", 2), ("ipc", 4), ("staged", 2), ("staged", 3), ("gloo", 2), ("nccl", 2), ("nccl", 3)],
)
def test_no_result_depends_on_the_delays(backend, num_ranks):
    """Bitwise; and kernels do run late, but in the last run."""
    base, is_ours = {**ONE_GPU, BACKEND_ENV_VAR: backend}, backend in ("ipc", "staged")
    runs = [
        values(run_ranks(everything, num_ranks, is_ours, limit_s=200, env={**base, **delays}, fresh=True))
        for delays in DELAYS
    ]
    assert len(runs[0][0][0]) > 30
    for run in runs[1:]:
        for first, other in zip(runs[0], run, strict=True):
            assert other[0] == first[0]
    num_late = [sum(late for _, late in run) for run in runs]
    assert num_late[-1] == 0
    assert min(num_late[:-1]) > 0
