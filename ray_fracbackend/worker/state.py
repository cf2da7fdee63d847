"""State of a start in its worker process, and the report for the train function."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray_fracbackend.report import StartReport
from ray_fracbackend.verify import VerificationResult

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


@dataclass
class WorkerState:
    """State of one process, over all starts in it.

    Attributes:
        store: Rank 0's store between the probe and the start.
        variables: Environment variables that a start has set, with the values that it set.
        memory_cap: Fraction and device of the cap on the process's CUDA memory.
        fault_helper: Helper process of the search for a fault.
        report: Ray's reference to the report of the last start, fetched on use only, and this worker's verification.
    """

    store: TCPStore | None = None
    variables: dict[str, str] = field(default_factory=dict)
    memory_cap: tuple[float, torch.device] | None = None
    fault_helper: subprocess.Popen[str] | None = None
    report: tuple[Any, VerificationResult | None] | None = None


STATE = WorkerState()


def get_start_report() -> StartReport | None:
    """Get the report of the start of the calling train function's worker group.

    Returns:
        The report. None if FracTorchConfig started nothing in this process, as outside of a train function, under another
        TorchConfig, and if the start was left to Ray Train.
    """
    if STATE.report is None:
        return None
    import ray

    source, verification = STATE.report
    report: StartReport = ray.get(source)
    return report.with_figures(verification)
