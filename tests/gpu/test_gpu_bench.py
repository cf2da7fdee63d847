"""The bench command on a GPU: real measurements of one small size, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from ray_fracbackend.cli.bench import _nccl_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_backend_that_takes_the_ranks_is_measured():
    """ipc, Gloo and a copy on the device; NCCL where its version and the devices allow it."""
    pytest.importorskip("tqdm", reason="bench needs tqdm (extra bench)")
    command = [sys.executable, "-m", "ray_fracbackend", "bench", "--device", "cuda", "--ranks", "2", "--json"]
    done = subprocess.run(
        [*command, "--sizes", "4096", "--rounds", "1"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    nccl = {"nccl"} if _nccl_env(2) is not None else set()
    assert {row["backend"] for row in result["rows"]} == {"ipc", "gloo", "copy"} | nccl
    assert result["hardware"]["gpus"]
