"""The check of a process group on a GPU: a stall of NCCL can be left, and no context is left on another device."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pynvml
import pytest
import torch
import torch.distributed as dist

from ray_fracbackend.errors import VerificationError
from ray_fracbackend.verify import verify_process_group
from ray_fracbackend.worker.group_end import end_process_group

sys.path.insert(0, str(Path(__file__).parents[1] / "ipc"))

from ipc_harness import Job, run_ranks, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL"),
]


def stall(job: Job) -> tuple[str, bool, str]:
    """Rank 1 takes no part in NCCL's first collective; rank 0 leaves it, and starts Gloo in the same process."""
    torch.cuda.set_device(0)
    job.init("nccl")
    if job.rank == 1:
        time.sleep(60)
    try:
        verify_process_group(timeout_s=5)
        text = ""
    except VerificationError as error:
        text = str(error)
    end_process_group(failed=True)
    left = not dist.is_initialized()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    return text, left, verify_process_group(device="cuda:0", timeout_s=20).device


def test_stalled_nccl_is_left():
    """A rank that waits in NCCL for one that does not come gets an error in time, and its process can start again."""
    text, left, device = values(run_ranks(stall, 2, limit_s=90, timeout_s=300, needed=1)[:1])[0]
    assert "failed on rank 0" in text
    assert (left, device) == (True, "cuda:0")


def processes_on(index: int) -> set[int]:
    """Process ids with a context on a GPU, by the driver."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()


def check_second_device(job: Job, backend: str) -> set[int]:
    """Verify on cuda:1 from a process whose current device is cuda:0; who has a context on GPU 0 then."""
    job.init(backend)
    verify_process_group(device="cuda:1", timeout_s=60)
    # Until the group's thread that watches the others has looked, too.
    time.sleep(6)
    found = {os.getpid()} & processes_on(0)
    dist.destroy_process_group()
    return found | {os.getpid()} & processes_on(0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("backend", "size"), [("ipc", 1), ("ipc", 2), ("staged", 1), ("staged", 2), ("nccl", 1)])
def test_no_context_on_another_device(backend: str, size: int):
    """The check takes no memory of the device that is current in the process and another rank's.

    Not with Gloo: torch's thread for it destroys CUDA events while the first device is current, which makes a context there.
    """
    assert values(run_ranks(check_second_device, size, backend)) == [set()] * size
