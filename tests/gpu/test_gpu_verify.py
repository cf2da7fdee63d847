"""The check of a process group on a GPU: a stall of NCCL can be left, and no context is left on another device."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pynvml
import pytest
import torch
import torch.distributed as dist
from ipc_harness import Job, on_ranks

from ray_fracbackend._torch import CONNECTS_NCCL_AT_ONCE
from ray_fracbackend.errors import VerificationError
from ray_fracbackend.verify.collectives import verify_process_group
from ray_fracbackend.worker.group_end import end_process_group

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")


@on_ranks(2, limit_s=90, timeout_s=300, needed=1)
def test_stalled_nccl_is_left(job: Job):
    """Rank 1 takes no part in NCCL's first collective: rank 0 gets an error in time, and can start Gloo in the same process."""
    torch.cuda.set_device(0)
    job.init("nccl")
    if job.rank == 1:
        time.sleep(60)
    with pytest.raises(VerificationError, match="failed on rank 0"):
        verify_process_group(timeout_s=5)
    end_process_group(failed=True)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    assert verify_process_group(device="cuda:0", timeout_s=20).device == "cuda:0"


def processes_on(index: int) -> set[int]:
    """Process ids with a context on a GPU, by the driver."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("backend", "size"), [("ipc", 1), ("ipc", 2), ("staged", 1), ("staged", 2), ("nccl", 1)])
@on_ranks()
def test_no_context_on_another_device(job: Job, backend: str, size: int):
    """A check on cuda:1 takes no memory of the device that is current in the process and another rank's.

    Not with Gloo: torch's thread for it destroys CUDA events while the first device is current, which makes a context there.
    """
    at_once = backend == "nccl" and CONNECTS_NCCL_AT_ONCE
    job.init(backend, device_id=torch.device("cuda:1") if at_once else None)
    verify_process_group(device="cuda:1", timeout_s=60)
    # Until the group's thread that watches the others has looked, too.
    time.sleep(6)
    assert os.getpid() not in processes_on(0)
    dist.destroy_process_group()
    assert os.getpid() not in processes_on(0)
