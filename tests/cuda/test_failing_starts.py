"""FracTorchConfig under Ray where CUDA refuses, lacks or loses something: the start ends, or goes on, and says why and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.cuda.cuda_steps import MEMORY_MIB
from tests.cuda.emulated import needs_rig
from tests.gpu.gpu_engine import ROOT, Engine

pytestmark = needs_rig

# A start has 60 s, a collective 30.
_LIMIT_S = 150.0


@pytest.fixture(scope="module")
def engine():
    """One Ray of the V2 engine, with one GPU in its books; a job that hangs ends it, and the next one starts another."""
    started = Engine("v2", CUDA_RIG_MEMORY_MIB=str(MEMORY_MIB))
    yield started
    started.close()


@pytest.fixture
def run(engine, tmp_path):
    """Run a job whose workers have a fault; returns what the ranks told, the last error of ours, and the seconds."""

    def job(fault, lose_at=None, **settings):
        started = time.monotonic()
        answer = engine.run("failing", _LIMIT_S, fault=fault, state=str(tmp_path), settings=settings, lose_at=lose_at)
        text = "\n".join(error["text"] for error in answer["errors"])
        print(f"{fault or 'no fault'}, {settings}: {time.monotonic() - started:.1f} s: {text or 'trained'}")
        return answer["ranks"], text

    return job


def trained(ranks, text, device="cuda:0"):
    """Check that both ranks went through; returns the start's report."""
    assert text == ""
    assert [rank["device"] for rank in ranks] == [device] * 2
    # 1, and half a rank's number more with each step.
    assert [rank["last"] for rank in ranks] == [4.0, 4.0]
    return ranks[0]["report"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("exclusive", "which is in compute mode EXCLUSIVE_PROCESS: one process at a time without MPS"),
        ("exclusive,no_nvml", "which is in compute mode EXCLUSIVE_PROCESS: one process at a time without MPS"),
        ("prohibited", "the device of ranks 0,1 is in compute mode PROHIBITED, in which no process can use it"),
        ("prohibited,no_nvml", "the device of ranks 0,1 is in compute mode PROHIBITED, in which no process can use it"),
    ],
)
def test_a_compute_mode_ends_the_start_before_cuda_fails(run, fault, says):
    """The rows of the table: nothing was tried. Without NVML the driver says the mode."""
    ranks, text = run(fault)
    assert ranks == []
    assert says in text
    assert "Run `nvidia-smi -c DEFAULT` on that node" in text
    assert "CUDA error" not in text


_NO_ROOM = ("required to create MPS client have been exhausted", "see nvidia-smi and dmesg of the node")
_LOST = ("unspecified launch failure", "see nvidia-smi and dmesg of the node")


@pytest.mark.parametrize(
    ("fault", "policy", "cause", "advice"),
    [
        ("mps_clients=1", "auto", *_NO_ROOM),
        ("mps_clients=1", "staged", *_NO_ROOM),
        ("mps_clients=1", "ipc", *_NO_ROOM),
        ("device_lost=1", "auto", *_LOST),
        ("device_lost=1", "ipc", *_LOST),
    ],
)
def test_a_device_that_cuda_refuses(run, fault, policy, cause, advice):
    """The error names rank, node, cause and what to do, and no other rank, no network and no search for a fault."""
    ranks, text = run(fault, on_shared_device=policy)
    assert ranks == []
    assert "rank " in text
    assert " (node " in text
    assert "cuda:0 cannot be used: " in text
    assert cause in text
    assert advice in text
    for misleading in ("network", "Connection closed", "is not in it", "Search for", "NCCL"):
        assert misleading not in text
    if fault == "mps_clients=1":
        assert text.count("cannot be used") == 1


@pytest.mark.parametrize("policy", ["auto", "staged", "ipc"])
def test_a_full_device(run, tmp_path, policy):
    """Another process has all memory of it: there is none for a context, which is no OutOfMemoryError of torch's."""
    command = [sys.executable, "-m", "tests.cuda.cuda_steps", "hold", str(MEMORY_MIB << 20)]
    env = {**os.environ, "CUDA_RIG_STATE": str(tmp_path), "CUDA_RIG_MEMORY_MIB": str(MEMORY_MIB)}
    holder = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"there\n"
        ranks, text = run("", on_shared_device=policy)
    finally:
        holder.communicate()
    assert ranks == []
    assert "ran out of device memory during start-up" in text
    assert "End other processes on the device, or ask for a larger GPU fraction" in text
    assert "CUDA error: out of memory" in text
    assert "network" not in text


def test_a_first_allocation_that_fails(run):
    """As on a device that is nearly full: torch's text, without its last sentences on fragmentation."""
    ranks, text = run("out_of_memory=1")
    assert ranks == []
    assert "ran out of device memory during start-up" in text
    assert "Tried to allocate 2.00 MiB" in text
    assert "expandable_segments" not in text


@pytest.mark.parametrize("policy", ["auto", "staged", "ipc"])
def test_a_gpu_that_is_lost_while_training(run, policy):
    """fit() ends with CUDA's words of the rank that had it, in bounded time."""
    ranks, text = run("", lose_at=3, on_shared_device=policy)
    assert ranks == []
    # torch's thread for Gloo frees pinned memory, which ends the process if it is the first to meet the lost device.
    is_aborted = policy == "auto" and "worker process has died" in text
    assert "CUDA error: unspecified launch failure" in text or is_aborted


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("no_ipc", "operation not supported|CUDA_ERROR_NOT_SUPPORTED"),
        ("no_ipc_import", "CUDA_ERROR_DEVICE_UNINITIALIZED"),
        ("no_stream_words", "cannot wait for memory"),
    ],
)
def test_ipc_that_the_machine_refuses(run, fault, why):
    """Tensors are staged through host memory, as documented, and the report says why."""
    report = trained(*run(fault, on_shared_device="ipc"))
    path = report["verification"]["path"]
    assert path.startswith("staged through host memory")
    assert any(each in path for each in why.split("|"))
    assert path.isprintable()


def test_staged_without_pinned_memory(run):
    """Copies are slower, and nothing fails."""
    trained(*run("no_pinned_memory", on_shared_device="staged"))


def test_gloo_without_pinned_memory(run):
    """Gloo copies through pinned memory: CUDA's text is that of a full device, and the device has memory."""
    ranks, text = run("no_pinned_memory")
    assert ranks == []
    assert "CUDA error: out of memory" in text
    assert "No host memory can be pinned: raise the limit on locked memory (ulimit -l)" in text
    assert "or use backend='staged'" in text
    assert "network" not in text
    assert "Search for" not in text


@pytest.mark.parametrize("fault", ["no_nvml", "nvml_DeviceGetHandleByUUID", "nvml_DeviceGetCount"])
def test_no_nvml(run, fault):
    """It is optional: the ranks share the device by CUDA's own UUID."""
    report = trained(*run(fault))
    assert [group["ranks"] for group in report["plan"]["share_groups"]] == [[0, 1]]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("no_driver", "finds no NVIDIA driver on the node"), ("no_device", "CUDA finds no GPU that it can use")],
)
def test_more_gpus_in_rays_books_than_there_are(run, fault, cause):
    """An error by default, with the cause and the setting; training on the CPU with that setting."""
    ranks, text = run(fault)
    assert ranks == []
    assert "Ray assigned ranks 0,1 GPUs that torch cannot use (node " in text
    assert cause in text
    assert "FracTorchConfig(on_missing_cuda='cpu')" in text
    report = trained(*run(fault, on_missing_cuda="cpu"), device="cpu")
    assert cause in report["plan"]["reason"]
