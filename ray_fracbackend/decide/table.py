"""Choose one backend for the job, from the workers and the settings, by a table of rules.

``ROWS`` is the table: guards, which refuse a start, come before choices. The first row whose condition is true decides.
Example: two workers with half a GPU each on a node with one device, torch with NCCL 2.28.9::

    ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.3: using gloo (NCCL 2.28.9 refuses shared devices)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray_fracbackend.decide import choices, refusals
from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.plan import Decision
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.errors import FracBackendError


def decide_start(
    workers: Sequence[WorkerInfo], settings: Settings, node_gpus: Mapping[str, float] | None = None
) -> Decision:
    """Choose the backend and the devices. The result does not depend on the order of the ranks.

    Args:
        workers: Every rank, in rank order, at least one.
        settings: The user's settings.
        node_gpus: Number of GPUs that Ray has on each node, by Ray's node id; for hints.

    Raises:
        SharedDeviceError: Devices are shared and ``on_shared_device="error"``, or their compute mode forbids it.
        MissingDeviceError: torch cannot use requested GPUs, and ``on_missing_cuda="error"``.
        IncompatibleWorkersError: Mixed NCCL versions where NCCL is needed, or Windows and Linux in one job.
        BackendUnavailableError: The requested backend cannot run on these workers.
    """
    return decide_job(Job(workers, settings, node_gpus or {}))


def deciding_row(job: Job) -> Row:
    """Return the first row whose condition is true; the last one is true for every job."""
    return next(row for row in ROWS if row.applies(job))


def decide_job(job: Job) -> Decision:
    """Make the decision, as in `decide_start`."""
    outcome = deciding_row(job).outcome(job)
    if isinstance(outcome, FracBackendError):
        raise outcome
    return outcome


@dataclass(frozen=True)
class Row:
    """One row of the decision.

    Attributes:
        name: Name of the row.
        case: Condition in markdown. It is checked only if no earlier row applies.
        result: Result in markdown.
        applies: The condition.
        outcome: Returns the decision, or the error of a guard. A choice that cannot be used raises an error.
    """

    name: str
    case: str
    result: str
    applies: Callable[[Job], bool]
    outcome: Callable[[Job], Decision | FracBackendError]


GUARDS = (
    Row(
        "mixed systems",
        "Windows and other systems in one job",
        "`IncompatibleWorkersError`, also for CPU jobs. Gloo cannot connect Windows with other systems",
        lambda job: 0 < len(job.on_windows) < len(job.workers),
        refusals.mixed_systems,
    ),
    Row(
        "NCCL without GPUs",
        'no GPU requested, `backend` is `"nccl"` or a pair with NCCL, and a rank has no visible GPU or no NCCL',
        "`MissingDeviceError`",
        lambda job: not job.asks_for_gpus and job.settings.backends.has_nccl and bool(refusals.cannot_use_nccl(job)),
        refusals.nccl_without_gpus,
    ),
    Row(
        "missing CUDA",
        'torch on a worker cannot use CUDA, `on_missing_cuda="error"`, and `backend` is neither gloo nor a pair without NCCL and staged',
        "`MissingDeviceError`. The message names the node and the [cause](#causes-of-missing-cuda)",
        lambda job: (
            job.asks_for_gpus
            and bool(job.without_cuda)
            and job.settings.on_missing_cuda == "error"
            and (job.wants_nccl or job.settings.backends.has_ipc or job.settings.backends.has_staged)
        ),
        refusals.missing_cuda,
    ),
    Row(
        "compute mode",
        "a worker's device is in compute mode PROHIBITED; or a shared one in EXCLUSIVE_PROCESS, and not all its ranks can reach MPS",
        "`MissingDeviceError`; for the shared device `SharedDeviceError`",
        lambda job: job.on_devices and bool(job.prohibited or job.exclusive),
        refusals.compute_mode,
    ),
    Row(
        "sharing forbidden",
        'devices are shared, and `on_shared_device="error"`',
        "`SharedDeviceError` with the ranks that share. From this row on, devices are [shared](#what-counts-as-shared) if ranks use the same "
        "device or, where NCCL is wanted, if NCCL would refuse the ranks",
        lambda job: job.on_devices and bool(job.conflicts) and job.settings.on_shared_device == "error",
        refusals.shared_error,
    ),
    Row(
        "mixed NCCL versions",
        "every rank has its own device, NCCL is wanted, and the workers loaded different NCCL versions",
        "`IncompatibleWorkersError`",
        lambda job: (
            job.on_devices and job.wants_nccl and not (job.conflicts or job.without_nccl) and len(job.nccl_versions) > 1
        ),
        refusals.mixed_versions,
    ),
)
CHOICES = (
    Row(
        "no GPUs",
        "no GPU requested",
        "gloo, or as requested. This can be ipc on host memory, staged, a pair or NCCL. `BackendUnavailableError` if a rank cannot use it",
        lambda job: not job.asks_for_gpus,
        choices.without_gpus,
    ),
    Row(
        "gloo without CUDA",
        'torch on a worker cannot use CUDA, and `on_missing_cuda="error"`',
        "gloo or the pair, as requested. A warning is logged. The group starts as with `TorchConfig`, and `get_device()` is not changed",
        lambda job: bool(job.without_cuda) and job.settings.on_missing_cuda == "error",
        choices.gloo_without_cuda,
    ),
    Row(
        "training on the CPU",
        "torch on a worker cannot use CUDA",
        "gloo, training on the CPU. If ipc is requested, ipc on host memory, or `BackendUnavailableError` if a rank cannot use it. The whole "
        "job does this, and `get_device()` returns cpu. There is a warning if `backend` names nccl or staged",
        lambda job: bool(job.without_cuda),
        choices.on_cpu,
    ),
    Row(
        "several ranks per GPU",
        'devices are shared, and `on_shared_device="nccl"` or the user set `NCCL_MULTI_RANK_GPU_ENABLE=1` on all ranks that share',
        "nccl with [flags](#variables-for-several-ranks-per-gpu). All workers need one NCCL version, 2.30 or newer; otherwise "
        "`BackendUnavailableError` or `IncompatibleWorkersError`. With the variable, gloo is the fallback if `on_shared_device` is "
        '`"auto"` or `"gloo"`, and there is a warning if the variable overrides `on_shared_device`',
        lambda job: job.asks_for_multi_rank,
        choices.multi_rank,
    ),
    Row(
        "ipc",
        '`backend="ipc"`, or devices are shared and `on_shared_device="ipc"`',
        "ipc on device memory. If it cannot be used, `BackendUnavailableError` with the reason. If the ranks cannot share device memory "
        "(slices of one GPU, for example), CUDA tensors are [staged](#how-cuda-tensors-travel) through host memory, with a warning. Checks "
        "that need several processes run in the group's first call with CUDA tensors",
        lambda job: job.settings.backends.has_ipc or job.shares_by("ipc"),
        choices.ipc_on_devices,
    ),
    Row(
        "staged",
        '`backend="staged"` or `"cpu:gloo,cuda:staged"`, or devices are shared and `on_shared_device="staged"`',
        "staged. If it cannot be used, `BackendUnavailableError` with the reason",
        lambda job: job.settings.backends.has_staged or job.shares_by("staged"),
        choices.staged_on_devices,
    ),
    Row(
        "gloo",
        '`backend="gloo"` or a pair without NCCL, or devices are shared and `on_shared_device="gloo"`',
        'gloo or the pair, as requested. On Windows, `on_shared_device="gloo"` uses staged, and `backend="gloo"` uses gloo with a warning, '
        "after a trial in a separate process, which may crash",
        lambda job: not job.wants_nccl or job.shares_by("gloo"),
        choices.gloo_on_devices,
    ),
    Row(
        "shared",
        'devices are shared, and `on_shared_device="auto"`',
        "gloo with a warning; on Windows staged. The warning states [the cost](#what-gloo-costs)",
        lambda job: bool(job.conflicts),
        choices.auto,
    ),
    Row(
        "no NCCL",
        "every rank has its own device, and torch on a worker has no NCCL",
        "gloo; on Windows staged. There is a warning if other ranks have NCCL",
        lambda job: bool(job.without_nccl),
        choices.own_without_nccl,
    ),
    Row(
        "own devices",
        "every rank has its own device",
        'nccl, with the environment of stock Ray. If NCCL still refuses ranks, Gloo under `on_shared_device="auto"` and `"gloo"`. If '
        "ranks use MIG slices of one GPU, a warning, and Gloo after any failure; see [MIG and containers](#mig-and-containers)",
        lambda job: True,
        choices.own,
    ),
)
ROWS = (*GUARDS, *CHOICES)
