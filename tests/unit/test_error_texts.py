"""NCCL's refusals in torch's error messages."""

import pytest

from ray_fracbackend.decide.error_texts import (
    awaited_ranks,
    cause_of,
    is_cuda_out_of_memory,
    is_invalid_usage,
    is_lost_connection,
    is_out_of_memory,
    is_own_failure,
    is_timeout,
    refusal_in,
    refused_ranks,
    says_nothing_of_device,
)

_HEAD = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage of NCCL library."
)
DUPLICATE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
REFUSALS = {
    "2.28.9": DUPLICATE,
    "2.30.3": "Multiple ranks detected using the same GPU on this node. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to allow it.",
    "2.30.3 with NVLS": (
        'Multiple ranks detected using the same GPU on this node and NCCL_NVLS_ENABLE has been set to "1". At this time '
        "multiple ranks per gpu is incompatible with NVLS."
    ),
    "2.30.7": (
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration."
    ),
    "2.30.7 with NVLS": (
        'NCCL_NVLS_ENABLE has been set to "1" and communicator has multiple ranks using the same NVML device. This is not '
        "compatible with NCCL_NVLS_ENABLE=1."
    ),
}


def torch_text(sentence=None):
    return _HEAD if sentence is None else f"{_HEAD}\nLast error:\n{sentence}"


@pytest.mark.parametrize("sentence", REFUSALS.values(), ids=REFUSALS)
def test_every_text_of_every_version(sentence):
    """Each message of NCCL is found in torch's error, without the surrounding text."""
    found = refusal_in(torch_text(sentence))
    assert found == sentence.split(". ")[0]
    assert refusal_in(f"rank 0 (node a): all failed ({found}). Do this; rank 1 (node a): other") == found


def test_ranks_where_nccl_names_them():
    """The old message contains two ranks, the new ones none."""
    assert refused_ranks(torch_text(DUPLICATE)) == (0, 1)
    assert refused_ranks(torch_text(REFUSALS["2.30.7"])) == ()


def test_bare_invalid_usage():
    """Without a message there is no refusal in the text, but NCCL's result is reported."""
    assert refusal_in(torch_text()) is None
    assert is_invalid_usage(torch_text())
    assert is_invalid_usage(torch_text().splitlines()[0])
    assert not is_invalid_usage("Connection reset by peer: invalid usage")


def test_cause_in_one_line():
    """torch's first line and NCCL's last error, or the class name if there is no message."""
    assert cause_of(RuntimeError(torch_text("remote process exited"))).endswith("2.28.9: remote process exited")
    assert cause_of(RuntimeError("first\nsecond")) == "first"
    assert cause_of(TimeoutError()) == "TimeoutError"


# torch's message for each NCCL result, as ProcessGroupNCCL of torch 2.14.1 raises it on the emulated NCCL (tests/cuda/test_nccl.py).
_RESULTS = {
    "system error": (
        "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7\nncclSystemError: System call "
        "(e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
    ),
    "cuda error": (
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7\nncclUnhandledCudaError: Call to "
        "CUDA function failed.\nLast error:\n"
    ),
    "remote error": (
        "remote process exited or there was a network error, NCCL version 2.30.7\nncclRemoteError: A call failed possibly due "
        "to a network error or a remote process exiting prematurely.\nLast error:\n"
    ),
}


@pytest.mark.parametrize(
    ("result", "last", "is_own", "is_full"),
    [
        ("system error", "Call to posix_memalign failed : Cannot allocate memory", True, False),
        ("system error", "Call to connect to 10.0.0.3<4711> failed : Connection refused", False, False),
        ("cuda error", "Cuda failure 2 'out of memory'", True, True),
        ("cuda error", "Cuda failure 719 'unspecified launch failure'", True, False),
        ("remote error", "socketProgress: Connection closed by remote peer node1<4711>", False, False),
    ],
)
def test_rank_at_fault(result, last, is_own, is_full):
    """A rank whose NCCL fails by itself is at fault; a rank that lost a peer is not."""
    text = f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:92, {_RESULTS[result]}{last}\n"
    assert is_own_failure(text) == is_own
    assert is_out_of_memory(text) == is_full
    assert not is_timeout(text)


def test_a_wait_that_ended():
    """torch names the group's timeout, not the limit of the wait."""
    assert is_timeout(
        "[PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, "
        "NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 19970 milliseconds before timing out."
    )
    assert not is_own_failure("CUDA error: out of memory")
    init = "Failed to initialize NCCL communicator: "  # torch 2.15
    assert is_own_failure(f"{init}unhandled system error (run with NCCL_DEBUG=INFO for details)")
    assert not is_own_failure(f"{init}remote process exited or there was a network error")
    assert is_lost_connection(f"{init}remote process exited or there was a network error")
    assert not is_out_of_memory("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("text", "untried", "full"),
    [
        ("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`", True, True),
        ("CUDA error: unspecified launch failure\nSee also: out of memory, busy or unavailable", False, False),
    ],
)
def test_only_the_first_line_is_about_the_device(text, untried, full):
    """torch appends lines with other errors: a failed device is not reported as a full or busy one."""
    assert says_nothing_of_device(RuntimeError(text)) is untried
    assert is_cuda_out_of_memory(RuntimeError(text)) is full


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("Gloo connectFullMesh failed with [pair.cc:143] no error, remote=[10.0.0.4]:1", True),
        ("wait timeout after 5000ms, keys: /default_pg/0//cpu//0/0", True),
        ("Timed out waiting 10000ms for recv operation to complete", True),
        ("[device.cc] bind: Address already in use", False),
    ],
)
def test_a_lost_connection_does_not_name_the_fault(text, is_lost):
    """After it the start searches for the fault; a rank with a failure of its own has said it."""
    assert is_lost_connection(text) is is_lost


def test_the_rank_that_gloo_waited_for():
    """c10d names the key of its address in the store; another key has no rank."""
    text = "wait timeout after 10000ms, keys: /441fe9d2/default_pg/0//cpu//0/1"
    assert awaited_ranks(text) == (1,)
    assert awaited_ranks("wait timeout after 10000ms, keys: /441fe9d2/default_pg/0/barrier/1") == ()
