"""Create the errors of a start on a worker: failed step, cause and advice. Runs on the worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ray_fracbackend._torch import CONNECTS_NCCL_AT_ONCE
from ray_fracbackend.decide.advice import advise
from ray_fracbackend.decide.error_texts import (
    awaited_ranks,
    cause_of,
    has_no_port,
    is_cuda_error,
    is_cuda_out_of_memory,
    nccl_kind,
    refusal_in,
)
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.errors import (
    BackendUnavailableError,
    FracBackendError,
    GroupFormationError,
    MissingDeviceError,
    RendezvousError,
    VerificationError,
)
from ray_fracbackend.timeouts import bounded

# Time limit for NVML, which may hang on a broken GPU.
_NVML_S = 2.0


@contextmanager
def named_step(step: str, plan: WorkerPlan, kind: type[RendezvousError]) -> Iterator[None]:
    """Convert torch's errors in the block into one of this class that names the step."""
    try:
        yield
    except (FracBackendError, torch.cuda.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{plan.master_addr}:{plan.master_port}"
        cause = cause_of(error)
        if not isinstance(error, (RuntimeError, TimeoutError)):  # not torch's
            cause = f"{type(error).__name__}: {cause}"
        raise kind(
            f"{step} at {where} failed ({cause}).",
            advice=_advice(plan, kind, error),
            ranks=awaited_ranks(cause) or (plan.rank,),
            kind="stalled" if isinstance(error, TimeoutError) else nccl_kind(error),
            step=step,
            cause=refusal_in(str(error)) or cause,
        ) from error


def refused_by_cuda(plan: WorkerPlan, failed: VerificationError) -> FracBackendError | None:
    """Return the error if CUDA refused a call in the verification, which creates the first context; None if the group failed."""
    error = failed.__cause__
    if not isinstance(error, Exception) or not is_cuda_error(error):
        return None
    if is_cuda_out_of_memory(error):  # of the host: for a full device torch raises OutOfMemoryError
        return BackendUnavailableError(str(failed), ranks=(plan.rank,))
    from ray_fracbackend.worker.missing_cuda import why_no_cuda  # not imported on the good path

    try:
        why = bounded(partial(why_no_cuda, error), _NVML_S)
    except TimeoutError:
        why = failed.found
    return MissingDeviceError(f"{plan.device} cannot be used: {why}.", ranks=(plan.rank,))


def _advice(plan: WorkerPlan, kind: type[RendezvousError], error: Exception) -> str:
    if not isinstance(error, (RuntimeError, TimeoutError)):
        return advise("fails by itself")
    if has_no_port(error):
        return advise("Gloo has no port")
    if "NCCL communicator" in str(error):
        return advise("NCCL fails", has_gloo=True)
    if kind is GroupFormationError and plan.backends.connects_with_gloo:
        interface = os.environ.get(IFNAME)
        over = f"over {interface}" if interface else "over the address of its host name"
        return advise("Gloo cannot connect", interface=over)
    hangs = isinstance(error, TimeoutError)  # it comes from bounded(); c10d's timeouts have another class
    if hangs and kind is GroupFormationError and plan.backends.has_nccl and CONNECTS_NCCL_AT_ONCE:
        return advise("NCCL hangs", has_gloo=True)
    return advise("rank 0 hangs" if hangs else "store not reached")
