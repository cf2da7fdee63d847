"""Choose one backend for the job, from the workers and the settings, by a table of rules.

``ROWS`` is the table: guards, which refuse a start, come before choices. The first row whose condition is true decides.
Example: two workers with half a GPU each on a node with one device, torch with NCCL 2.28.9::

    ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.3: using gloo (NCCL 2.28.9 refuses shared devices)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_fracbackend.decide import choices
from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.plan import Decision
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.errors import FracBackendError


def decide_start(workers: Sequence[WorkerInfo], settings: Settings) -> Decision:
    """Choose the backend and the devices. The result does not depend on the order of the ranks.

    Args:
        workers: Every rank, in rank order, at least one.
        settings: The user's settings.

    Raises:
        SharedDeviceError: Devices are shared and ``on_shared_device="error"``, or their compute mode forbids it.
        MissingDeviceError: torch cannot use requested GPUs, and ``on_missing_cuda="error"``.
        IncompatibleWorkersError: Mixed NCCL versions where NCCL is needed, or Windows and Linux in one job.
        BackendUnavailableError: The requested backend cannot run on these workers.
    """
    job = Job(workers, settings)
    outcome = next(row for row in ROWS if row.applies(job)).outcome(job)
    if isinstance(outcome, FracBackendError):
        raise outcome
    return outcome


@dataclass(frozen=True)
class Row:
    """One row of the decision.

    Attributes:
        name: Its name in docs/how-it-decides.md, which explains the condition and the result.
        applies: The condition. It is checked only if no earlier row applies.
        outcome: Returns the decision, or the error of a guard. A choice that cannot be used raises an error.
    """

    name: str
    applies: Callable[[Job], bool]
    outcome: Callable[[Job], Decision | FracBackendError]


ROWS = (
    # Guards.
    Row("mixed systems", lambda job: 0 < len(job.windows_ranks) < len(job.workers), choices.mixed_systems),
    Row(
        "NCCL without GPUs",
        lambda job: not job.asks_for_gpus and job.settings.backends.has_nccl and bool(job.ranks_without_nccl_or_device),
        choices.nccl_without_gpus,
    ),
    Row(
        "missing CUDA",
        lambda job: (
            job.asks_for_gpus
            and bool(job.workers_without_cuda)
            and job.settings.on_missing_cuda == "error"
            and (job.wants_nccl or job.settings.backends.has_ipc or job.settings.backends.has_staged)
        ),
        choices.missing_cuda,
    ),
    Row("compute mode", lambda job: job.trains_on_devices and bool(job.exclusive_without_mps), choices.compute_mode),
    Row(
        "sharing forbidden",
        lambda job: job.trains_on_devices and bool(job.conflicts) and job.settings.on_shared_device == "error",
        choices.shared_error,
    ),
    Row(
        "mixed NCCL versions",
        lambda job: (
            job.trains_on_devices
            and job.wants_nccl
            and not (job.conflicts or job.ranks_without_nccl)
            and len(job.nccl_versions) > 1
        ),
        choices.mixed_versions,
    ),
    # Choices.
    Row("no GPUs", lambda job: not job.asks_for_gpus, choices.without_gpus),
    Row(
        "gloo without CUDA",
        lambda job: bool(job.workers_without_cuda) and job.settings.on_missing_cuda == "error",
        choices.gloo_without_cuda,
    ),
    Row("training on the CPU", lambda job: bool(job.workers_without_cuda), choices.on_cpu),
    Row("several ranks per GPU", lambda job: job.wants_multi_rank, choices.multi_rank),
    Row("ipc", lambda job: job.settings.backends.has_ipc or job.shares_by("ipc"), choices.ipc_on_devices),
    Row("staged", lambda job: job.settings.backends.has_staged or job.shares_by("staged"), choices.staged_on_devices),
    Row("gloo", lambda job: not job.wants_nccl or job.shares_by("gloo"), choices.gloo_on_devices),
    Row("shared", lambda job: bool(job.conflicts), choices.instead_of_nccl),
    Row("no NCCL", lambda job: bool(job.ranks_without_nccl), choices.instead_of_nccl),
    Row("own devices", lambda job: True, choices.own),
)
