"""check_devices on emulated devices: what it says of NCCL is what NCCL does with a group of the same processes."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ipc_harness import run_ranks, values

from ray_fracbackend import MissingDeviceError, check_devices
from ray_fracbackend._torch import CONNECTS_NCCL_AT_ONCE
from ray_fracbackend.decide.error_texts import is_invalid_usage
from tests.cuda.emulated import run_program, uuid

pytestmark = pytest.mark.timeout(120)

FLAGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
SLICES = {"CUDA_RIG_MIG": "2"}


def then_nccl(job, device, set_current):
    """Check the processes, then make the group with NCCL whatever the check says; the check, and NCCL's sum or refusal."""
    index = device(job.rank)
    if set_current:
        torch.cuda.set_device(index)
    found = check_devices(
        store=job.store(), rank=job.rank, world_size=job.size, device=None if set_current else index, timeout_s=20
    )
    torch.cuda.set_device(index)
    for name, value in found.env.items():
        os.environ.setdefault(name, value)
    tensor = torch.full((3,), job.rank + 1.0, device="cuda")
    try:
        job.init("nccl", device_id=torch.device("cuda", index) if CONNECTS_NCCL_AT_ONCE else None)
        dist.all_reduce(tensor)
        return found, tensor.tolist()
    except RuntimeError as error:
        return found, is_invalid_usage(str(error))


def first(rank):
    return 0


def own(rank):
    return rank


@pytest.mark.parametrize("set_current", [False, True], ids=["device", "current device"])
@pytest.mark.parametrize(
    ("device", "backend", "env"),
    [
        (first, "gloo", {"CUDA_RIG_NCCL": "2.28.9"}),
        (own, "nccl", {"CUDA_RIG_NCCL": "2.28.9", "CUDA_RIG_DEVICES": "2"}),
        (first, "gloo", {"CUDA_RIG_NCCL": "2.30.7"}),
        (first, "nccl", {"CUDA_RIG_NCCL": "2.30.7", **FLAGS}),
        # Slices: by their bus ids one device, by their UUIDs two; what counts is the version of NCCL.
        (first, "gloo", {"CUDA_RIG_NCCL": "2.28.9", **SLICES}),
        (first, "nccl", {"CUDA_RIG_NCCL": "2.30.7", **SLICES}),
    ],
    ids=["shared", "own", "shared 2.30", "flags", "slices", "slices 2.30"],
)
def test_nccl_does_what_is_said_of_it(tmp_path, device, backend, env, set_current):
    """With the device passed, and with the current one, which is no rank's first."""
    uuids = [uuid(0, rank) if "CUDA_RIG_MIG" in env else uuid(device(rank)) for rank in range(2)]

    def variables(rank):
        visible = {"CUDA_VISIBLE_DEVICES": uuids[rank]} if "CUDA_RIG_MIG" in env else {}
        return {"CUDA_RIG_DEVICES": "1", "CUDA_RIG_STATE": str(tmp_path), **visible, **env}

    for check, nccl in values(run_ranks(then_nccl, 2, device, set_current, env=variables, limit_s=90.0)):
        assert check.backend == backend
        assert [each.uuid for each in check.devices] == uuids
        assert nccl == [3.0] * 3 if backend == "nccl" else nccl is True


def without(job, fault):
    """Rank 1 has a fault, or was forked from a process that had used CUDA."""
    device = "cuda:5" if fault == "no such device" and job.rank else None
    try:
        check_devices(store=job.store(), rank=job.rank, world_size=job.size, device=device, timeout_s=20)
    except MissingDeviceError as error:
        return str(error), error.ranks
    return None


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no_driver", "no NVIDIA driver"),
        ("no such device", "cuda:5 cannot be used: "),
        ("hidden", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_rank_without_its_device(tmp_path, fault, text):
    """Every rank learns whose device is missing and why."""

    def variables(rank):
        of_rank = {"no_driver": {"CUDA_RIG_FAULT": "no_driver"}, "hidden": {"CUDA_VISIBLE_DEVICES": ""}}
        return {"CUDA_RIG_STATE": str(tmp_path), **(of_rank.get(fault, {}) if rank else {})}

    for told, ranks in values(run_ranks(without, 2, fault, env=variables, limit_s=90.0, fresh=True)):
        assert ranks == (1,)
        assert text in told


FORKED = """
import os, torch, torch.distributed as dist
from ray_fracbackend import check_devices
torch.cuda.init()
if os.fork() == 0:
    try:
        check_devices(store=dist.HashStore(), rank=0, world_size=1)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
print(torch.cuda.memory_allocated(), torch.cuda.is_initialized())
"""


def test_in_a_forked_process():
    """CUDA refuses a child of a process that has used it: the error says so."""
    done = run_program(FORKED)
    assert done.stdout.startswith("MissingDeviceError rank 0 cannot use a CUDA device"), done.stdout + done.stderr
    assert "fork" in done.stdout
