"""Explain a failed verification: the step, missing ranks, and ranks at fault. Needs only torch, not Ray."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from ray_fracbackend.decide.advice import advise
from ray_fracbackend.decide.error_texts import (
    cause_of,
    is_cuda_error,
    is_cuda_out_of_memory,
    is_out_of_memory,
    nccl_kind,
    refusal_in,
    refused_ranks,
)
from ray_fracbackend.decide.worker_info import ranks_text
from ray_fracbackend.errors import FracBackendError, SharedDeviceError, VerificationError
from ray_fracbackend.timeouts import bounded

if TYPE_CHECKING:
    from ray_fracbackend.verify.collectives import Verification

# Number of ranks that look for missing ranks when a collective stalls; more would only load the store.
_NUM_REPORTERS = 8
# How long they wait for the records of the others, which have the same deadline.
_REPORT_S = 1.0
# With less free memory the device has no room for a context or for torch's first allocations.
_SPARE_BYTES = 64 << 20


def raise_failure(verification: Verification, error: Exception) -> None:
    """Raise the error that explains a failed verification; return if the original error already does.

    Raises:
        SharedDeviceError: NCCL refused ranks that share a GPU.
        torch.cuda.OutOfMemoryError: The device was full for its context or for NCCL.
        VerificationError: The collective failed or did not return; with the step, the rank and the missing ranks.
    """
    if isinstance(error, (FracBackendError, torch.cuda.OutOfMemoryError)):
        _record(verification, "failed")
        return
    if _has_no_memory(error, verification.device):
        _record(verification, "failed")
        raise torch.cuda.OutOfMemoryError(cause_of(error)) from error
    # NCCL connects in the first collective, so its errors for shared GPUs occur here.
    if refusal := refusal_in(str(error)):
        _record(verification, "failed")
        raise SharedDeviceError(
            f"NCCL refused ranks that share a GPU: {refusal}.",
            advice=advise("refused", has_gloo=True),
            ranks=[verification.global_ranks[rank] for rank in refused_ranks(refusal)],
            kind="refused",
            step=verification.step,
            cause=refusal,
        ) from error
    raise _failed(verification, error) from error


def _has_no_memory(error: Exception, device: torch.device) -> bool:
    """Return whether the device has no memory for its context or for NCCL; False if pinning host memory was refused."""
    if is_out_of_memory(str(error)):
        return True
    if device.type != "cuda" or not is_cuda_out_of_memory(error):
        return False
    try:
        return torch.cuda.mem_get_info(device)[0] < _SPARE_BYTES
    except RuntimeError:  # the call needs a context too
        return True


def _failed(verification: Verification, error: Exception) -> VerificationError:
    kind = "stalled" if isinstance(error, TimeoutError) else nccl_kind(error)
    elapsed_s = time.perf_counter() - verification.started
    text, cause = f"{verification.step} failed on rank {verification.own_rank} after {elapsed_s:.1f} s", cause_of(error)
    is_cuda = is_cuda_error(error)
    if is_cuda or kind == "own_failure":  # of this rank, even if another rank is missing
        _record(verification, "failed")
        kind, ranks = "own_failure", [verification.own_rank]
    else:
        absent = _absent(verification)
        # Gloo ends a wait for peers at the same time limit by itself, so a call that does not return hangs on this rank,
        # unless the store does not answer either.
        hangs = isinstance(error, TimeoutError) and verification.backend == "gloo" and absent is not None
        ranks = absent or ([verification.own_rank] if hangs else [])
        if absent:
            text += f": {ranks_text(absent)} {'is' if len(absent) == 1 else 'are'} not in it"
        if kind == "stalled":
            cause = f"no answer within {verification.timeout_s:.3g} s"
    if is_cuda_out_of_memory(error):  # and the device has free memory
        advice = advise("no pinned memory")
    elif is_cuda:
        advice = advise("CUDA refuses", device=str(verification.device))
    elif kind == "own_failure":
        advice = advise("NCCL fails", has_gloo=verification.has_gloo)
    elif kind == "stalled" and not ranks and verification.backend == "nccl":
        advice = advise("NCCL hangs", has_gloo=verification.has_gloo)
    else:
        advice = advise("peer lost")
    return VerificationError(
        f"{text} ({cause}).", advice=advice, ranks=ranks, kind=kind, step=verification.step, cause=cause
    )


def _record(verification: Verification, word: str) -> None:
    """Write a record of this rank to the store, so that peers do not report it as missing."""
    with contextlib.suppress(RuntimeError):  # the process of the store may have ended
        verification.store.set(str(verification.rank), word)


def _absent(verification: Verification) -> list[int] | None:
    """Return the global ranks without a record in the store, None if the store does not answer."""
    try:
        # A call that has not returned may block the store's client.
        return bounded(partial(_looked_up, verification), 2 * _REPORT_S)
    except TimeoutError:
        return None


def _looked_up(verification: Verification) -> list[int] | None:
    absent = [rank for rank in range(verification.world_size) if rank != verification.rank]
    end = time.monotonic() + _REPORT_S
    try:
        verification.store.set(str(verification.rank), "stuck")
        if verification.rank >= _NUM_REPORTERS:
            return []
        while absent and time.monotonic() < end:
            absent = [rank for rank in absent if not verification.store.check([str(rank)])]
            time.sleep(0.02)
    except (RuntimeError, ValueError):  # the process of the store has ended
        return None
    return [verification.global_ranks[rank] for rank in absent]
