"""Errors of the guards: why a job cannot start with these settings, and what to change."""

from __future__ import annotations

import copy

from ray_fracbackend.decide.device_sharing import share_text, sharing_ranks
from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.worker_info import ranks_text, version_text
from ray_fracbackend.errors import FracBackendError, IncompatibleWorkersError, MissingDeviceError, SharedDeviceError


def if_it_helps(job: Job, text: str, **settings: str) -> str:
    """Return the text if the start would succeed with these settings instead of the user's, else an empty string."""
    if not job.is_asked:
        return ""
    from ray_fracbackend.decide.table import decide_job  # table.py imports this module

    changed = copy.copy(job.settings)
    for name, value in settings.items():
        setattr(changed, name, value)
    try:
        other = decide_job(Job(job.workers, changed, is_asked=False))
    except FracBackendError:
        return ""
    dies = bool(job.on_windows) and other.device_type == "cuda" and other.backends.by_device.get("cuda") == "gloo"
    return "" if dies else text


def mixed_systems(job: Job) -> FracBackendError:
    """Return the error for Windows and other systems in one job."""
    return IncompatibleWorkersError(
        f"Windows on {ranks_text(job.on_windows)}, Linux or macOS on the others. Gloo cannot connect Windows with other "
        "systems (gloo#386); place all workers on nodes of one system.",
        ranks=job.on_windows,
    )


def cannot_use_nccl(job: Job) -> list[int]:
    """Return the ranks of a job without GPUs that cannot use NCCL."""
    return [worker.rank for worker in job.workers if not worker.nccl_available or worker.num_visible_devices == 0]


def nccl_without_gpus(job: Job) -> FracBackendError:
    """Return the error for an explicit NCCL on workers without any GPU."""
    ranks = cannot_use_nccl(job)
    auto = if_it_helps(job, ", or use backend='auto' or 'gloo'", backend="auto")
    return MissingDeviceError(
        f"backend={job.settings.backend!r} needs GPUs and NCCL; {ranks_text(ranks)} lack{'s' if len(ranks) == 1 else ''} one of them. Ask "
        f"for GPUs in ScalingConfig(use_gpu=True){auto}.",
        ranks=ranks,
    )


def missing_cuda(job: Job) -> FracBackendError:
    """Return the error for GPUs of Ray that torch cannot use."""
    on_cpu = if_it_helps(
        job, ", or set FracTorchConfig(on_missing_cuda='cpu') to train on the CPU", on_missing_cuda="cpu"
    )
    return MissingDeviceError(
        f"{job.found_without_cuda}. Every GPU worker needs a CUDA device; correct num_gpus of those nodes or their torch and "
        f"driver{on_cpu}.",
        ranks=[worker.rank for worker in job.without_cuda],
    )


def compute_mode(job: Job) -> FracBackendError:
    """Return the error for a compute mode that allows no process, or no second process, on a device."""
    if job.prohibited:
        return MissingDeviceError(
            f"the device of {ranks_text(job.prohibited)} is in compute mode PROHIBITED, in which no process can use it. "
            "Run `nvidia-smi -c DEFAULT` on that node.",
            ranks=job.prohibited,
        )
    group = job.exclusive[0]
    return SharedDeviceError(
        f"{group.text}, which is in compute mode EXCLUSIVE_PROCESS: one process at a time without MPS. Run "
        "`nvidia-smi -c DEFAULT` on that node, or start the MPS daemon (`nvidia-cuda-mps-control -d`).",
        ranks=group.ranks,
    )


def shared_error(job: Job) -> FracBackendError:
    """Return the error for shared devices that the policy forbids."""
    auto = if_it_helps(job, ", or set on_shared_device to 'auto' or 'gloo'", on_shared_device="auto")
    return SharedDeviceError(
        f"{share_text(job.conflicts)}, and on_shared_device='error' forbids it. Ask for a whole GPU per worker or for fewer "
        f"workers{auto}.",
        ranks=sharing_ranks(job.conflicts),
    )


def mixed_versions(job: Job) -> IncompatibleWorkersError:
    """Return the error for different NCCL versions."""
    ranks_by_version = {
        version_text(version): [worker.rank for worker in job.workers if worker.nccl_version == version]
        for version in job.nccl_versions
    }
    listed = "; ".join(f"{ranks_text(ranks)}: {version}" for version, ranks in sorted(ranks_by_version.items()))
    gloo = if_it_helps(job, ", or use backend='gloo'", backend="gloo")
    return IncompatibleWorkersError(
        f"the workers loaded different NCCL versions ({listed}). NCCL needs one version on all ranks; install the same "
        f"torch and nvidia-nccl packages on every node{gloo}."
    )
