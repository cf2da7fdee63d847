"""State that starts keep in the worker process, and the report for the train function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray_fracbackend.report.start_report import StartReport
from ray_fracbackend.verify.result import VerificationResult

if TYPE_CHECKING:
    import ray
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


@dataclass
class WorkerState:
    """State of one process, shared by all starts in it.

    Attributes:
        store: Rank 0's store between the probe and the start.
        variables: Environment variables that a start has set, with these values.
        memory_cap: Fraction and device of the cap on the process's CUDA memory.
        nccl_env: NCCL's variables when a start created NCCL's communicator, on rank 0; else None.
        report: Ray's reference to the report of the last start, fetched only on use, and this worker's verification.
    """

    store: TCPStore | None = None
    variables: dict[str, str] = field(default_factory=dict)
    memory_cap: tuple[float, torch.device] | None = None
    nccl_env: dict[str, str] | None = None
    report: tuple[ray.ObjectRef[StartReport], VerificationResult | None] | None = None


STATE = WorkerState()


def get_start_report() -> StartReport | None:
    """Return the start report of this training run.

    Returns:
        The report. None if FracTorchConfig did not start the process group of this process: outside a train function,
        with another TorchConfig, or if the start was left to Ray Train.
    """
    if STATE.report is None:
        return None
    import ray

    source, verification = STATE.report
    report: StartReport = ray.get(source)
    return report.with_figures(verification)
