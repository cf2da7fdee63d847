"""Device meshes over ranks that share a device: the backend of their groups, by torch's release."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ipc_harness import run_ranks, values
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ray_fracbackend.ipc
import ray_fracbackend.staged  # noqa: F401  # both register their backends
from ray_fracbackend.decide.error_texts import is_invalid_usage
from tests.cuda.emulated import MAKES_NCCL, needs_rig

pytestmark = [needs_rig, pytest.mark.timeout(120)]


def sums(job, backend, from_group):
    """Compute a sum over a mesh of all ranks; return its result or error."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        backend, store=job.store(), rank=job.rank, world_size=job.size, timeout=timedelta(seconds=job.timeout_s)
    )
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda") if from_group else init_device_mesh("cuda", (job.size,))
    tensor = torch.full((3,), job.rank + 1.0, device="cuda")
    try:
        dist.all_reduce(tensor, group=mesh.get_group())
        return tensor.tolist()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("from_group", [False, True], ids=["init_device_mesh", "from_group"])
@pytest.mark.parametrize("backend", ["gloo", "ipc", "cpu:gloo,cuda:staged"])
def test_a_mesh_of_all_ranks(tmp_path, backend, from_group):
    """It uses the default group or one with the same backend; only old releases of torch use NCCL beside Gloo."""
    env = {"CUDA_RIG_DEVICES": "1", "CUDA_RIG_STATE": str(tmp_path)}
    for result in values(run_ranks(sums, 2, backend, from_group, env=env, limit_s=90.0)):
        if backend == "gloo" and not from_group and MAKES_NCCL:
            assert is_invalid_usage(result)
        else:
            assert result == [3.0] * 3
