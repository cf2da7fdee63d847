"""What an all_reduce asks of a device, counted on the emulated runtime: the bounds that docs/ipc.md and docs/staged.md have."""

from __future__ import annotations

import pytest
import torch
from ipc_harness import BACKEND_ENV_VAR, DEVICE_ENV_VAR, run_ranks, values

MIB = 1 << 20
SIZES = [4096, MIB, 25 * MIB]


def counted(job, sizes, dtype):
    """Counters of one call of each size, in a group that has done some like it before."""
    from rig_counters import count_all_reduce

    job.init()
    return [count_all_reduce(size, dtype, torch.device("cuda:0")) for size in sizes]


def counters_of(backend, num_ranks, dtype):
    env = {DEVICE_ENV_VAR: "cuda:0", BACKEND_ENV_VAR: backend}
    ranks = values(run_ranks(counted, num_ranks, SIZES, dtype, limit_s=200, env=env))
    return dict(zip(SIZES, zip(*ranks, strict=True), strict=True))


def moved_bytes(ranks):
    """Bytes that the device reads and writes; a copy does both."""
    return sum(2 * rank.device_copy_bytes + rank.kernel_bytes for rank in ranks)


def bound(size, num_ranks):
    """Bytes moved on the device for N ranks, by docs/ipc.md: in one pass each rank adds all tensors itself, else the first one does."""
    own = num_ranks + 1
    if size <= 256 << 10:
        return num_ranks * (2 + own) * size
    # Of two the first rank reads its own where it is.
    return (own + 4 * num_ranks - (2 if num_ranks == 2 else 0)) * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ipc(num_ranks, dtype):
    """No byte goes to the host, the host waits for nothing, and the device moves no more than docs/ipc.md says."""
    for size, ranks in counters_of("ipc", num_ranks, dtype).items():
        assert moved_bytes(ranks) <= bound(size, num_ranks)
        is_one_pass = size <= 256 << 10
        assert sum(rank.word_waits for rank in ranks) == (num_ranks if is_one_pass else 2) * (num_ranks - 1)
        assert sum(rank.kernels for rank in ranks) == (num_ranks if is_one_pass else 1)
        for rank in ranks:
            assert (rank.to_host_bytes, rank.to_device_bytes) == (0, 0)
            assert (rank.host_waits, rank.host_polls, rank.contexts) == (0, 0, 0)
            assert rank.peer_event_waits == 0
            assert rank.device_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged(dtype):
    """Each byte goes to the host once and back once, and nothing is copied or computed on the device."""
    for size, ranks in counters_of("staged", 2, dtype).items():
        for rank in ranks:
            assert (rank.to_host_bytes, rank.to_device_bytes, rank.device_copy_bytes) == (size, size, 0)
            assert (rank.kernels, rank.contexts, rank.device_bytes) == (0, 0, 0)
            assert rank.peer_event_waits == 0
