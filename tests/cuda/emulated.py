"""What the tests on the emulated CUDA runtime share: its counters, and programs in processes of their own with a fault each."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from torch.torch_version import TorchVersion

IS_LOADED = hasattr(ctypes.CDLL(None), "rig_counters") if sys.platform == "linux" else False
needs_rig = pytest.mark.skipif(
    not IS_LOADED, reason="needs the emulated CUDA runtime: python ci/cuda.py pytest tests/cuda"
)


def emulated(*values):
    """Parameters of a test for every GPU that only the emulated one runs, with --full: device time is short."""
    return pytest.param(*values, marks=[pytest.mark.full(), needs_rig])


# What every backend can do, of the table of the ipc tests.
COMMON_DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.int8, torch.uint8),
]
# For a mesh of all ranks whose default group is "gloo", older releases make one of "cpu:gloo,cuda:nccl" (device_mesh.py). Which one stopped
# was not looked up: 2.7.1 does, 2.14.1 does not.
MAKES_NCCL = TorchVersion(torch.__version__) < (2, 8)


def run_program(
    source: str, *arguments: str, limit_s: float = 60.0, input: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a process of its own on the emulated runtime, with these variables."""
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env={**os.environ, **env},
        input=input,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def uuid(gpu: int, slice_: int | None = None) -> str:
    """UUID of a device of the emulated machine, by its rule in ci/cuda/devices.cpp."""
    bytes_ = [(0xA0 + 16 * gpu + i) & 0xFF for i in range(16)]
    if slice_ is not None:
        bytes_[0] = 0x10 + slice_
    text = bytes(bytes_).hex()
    parts = text[:8], text[8:12], text[12:16], text[16:20], text[20:]
    return f"{'GPU' if slice_ is None else 'MIG'}-{'-'.join(parts)}"


def workers(number, num_gpus=1, **more):
    """Return a ScalingConfig's arguments for workers with this number of GPUs each."""
    resources = {"CPU": 1, "GPU": num_gpus}
    return {"num_workers": number, "use_gpu": True, "resources_per_worker": resources, **more}
