"""FracTorchConfig under Ray where CUDA refuses, lacks or loses something: the start ends, or goes on, and says why and what to do."""

from __future__ import annotations

import time

import pytest

from tests.cuda.cuda_steps import MEMORY_MIB, holding
from tests.gpu.gpu_engine import Engine

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
        settings = {"start_timeout_s": 60, "timeout_s": 30, **settings}
        env = {"CUDA_RIG_FAULT": fault, "CUDA_RIG_STATE": str(tmp_path)}
        answer = engine.run("failing", _LIMIT_S, worker_env=env, settings=settings, lose_at=lose_at)
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


# The row of the table: nothing was tried. Without NVML the driver says the mode.
_EXCLUSIVE = ["which is in compute mode EXCLUSIVE_PROCESS", "nvidia-smi -c DEFAULT"], ["CUDA error"]


# No other rank, no network and no search for a fault.
_MISLEADING = ["network", "Connection closed", "is not in it", "Search for", "NCCL"]
_ALONE = ["rank ", " (node ", "cuda:0 cannot be used: "]
_NO_ROOM = (
    [*_ALONE, "required to create MPS client have been exhausted", "see nvidia-smi and the system's log"],
    _MISLEADING,
)
_LOST = [*_ALONE, "unspecified launch failure", "see nvidia-smi and the system's log"], _MISLEADING
_FULL = ["ran out of device memory during start-up"]
# Fault, policy, what the error must contain, and what it must not.
ENDS = [
    *[(f"exclusive{nvml}", "auto", *_EXCLUSIVE) for nvml in ("", ",no_nvml")],
    ("prohibited", "auto", [*_ALONE, "is in compute mode PROHIBITED", "nvidia-smi -c DEFAULT"], _MISLEADING),
    *[("mps_clients=1", policy, *_NO_ROOM) for policy in ("auto", "staged", "ipc")],
    *[("device_lost=1", policy, *_LOST) for policy in ("auto", "ipc")],
    # As on a device that is nearly full: torch's text, without its last sentences on fragmentation.
    ("out_of_memory=1", "auto", [*_FULL, "Tried to allocate 2.00 MiB"], ["expandable_segments"]),
    # Gloo copies through pinned memory: CUDA's text is that of a full device, and the device has memory.
    (
        "no_pinned_memory",
        "auto",
        ["CUDA error: out of memory", "ulimit -l", "backend='staged'"],
        ["network", "Search for"],
    ),
]


@pytest.mark.parametrize(("fault", "policy", "said", "unsaid"), ENDS)
def test_a_start_that_ends(run, fault, policy, said, unsaid):
    """The error names rank, node, cause and what to do."""
    ranks, text = run(fault, on_shared_device=policy)
    assert ranks == []
    assert [part for part in said if part not in text] == []
    assert [part for part in unsaid if part in text] == []


@pytest.mark.parametrize("policy", ["auto", "staged", "ipc"])
def test_a_full_device(run, tmp_path, policy):
    """Another process has all memory of it: there is none for a context, which is no OutOfMemoryError of torch's."""
    with holding(MEMORY_MIB << 20, CUDA_RIG_STATE=str(tmp_path), CUDA_RIG_MEMORY_MIB=str(MEMORY_MIB)):
        ranks, text = run("", on_shared_device=policy)
    assert ranks == []
    assert [part for part in (*_FULL, "larger GPU fraction", "CUDA error: out of memory") if part not in text] == []
    assert "network" not in text


@pytest.mark.parametrize("policy", ["auto", "staged", "ipc"])
def test_a_gpu_that_is_lost_while_training(run, policy):
    """fit() ends with CUDA's words of the rank that had it, in bounded time."""
    ranks, text = run("", lose_at=3, on_shared_device=policy)
    assert ranks == []
    # torch's thread for Gloo frees pinned memory, which ends the process if it is the first to meet the lost device.
    is_aborted = policy == "auto" and "worker process has died" in text
    assert "CUDA error: unspecified launch failure" in text or is_aborted


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("no_ipc", ("operation not supported", "CUDA_ERROR_NOT_SUPPORTED")),
        ("no_ipc_import", ("CUDA_ERROR_DEVICE_UNINITIALIZED",)),
        ("no_stream_words", ("cannot wait for memory",)),
    ],
)
def test_ipc_that_the_machine_refuses(run, fault, reasons):
    """Tensors are staged through host memory, as documented, and the report says why."""
    report = trained(*run(fault, on_shared_device="ipc"))
    path = report["verification"]["path"]
    assert path.startswith("staged through host memory")
    assert any(each in path for each in reasons)
    assert path.isprintable()


@pytest.mark.parametrize(
    ("fault", "policy"),
    [
        # Copies are slower.
        ("no_pinned_memory", "staged"),
        # NVML is optional.
        *((fault, "auto") for fault in ("no_nvml", "nvml_DeviceGetHandleByUUID", "nvml_DeviceGetCount")),
    ],
)
def test_what_is_not_needed(run, fault, policy):
    """Nothing fails, and the ranks share the device by CUDA's own UUID."""
    report = trained(*run(fault, on_shared_device=policy))
    assert [group["ranks"] for group in report["plan"]["share_groups"]] == [[0, 1]]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("no_driver", "finds no NVIDIA driver on the node"), ("no_device", "finds no GPU")],
)
def test_more_gpus_in_rays_books_than_there_are(run, fault, cause):
    """An error by default, with the cause and the setting; training on the CPU with that setting."""
    ranks, text = run(fault)
    assert ranks == []
    assert cause in text
    assert "on_missing_cuda='cpu'" in text
    report = trained(*run(fault, on_missing_cuda="cpu"), device="cpu")
    assert cause in report["plan"]["reason"]
