"""State of a start in its worker process, and the report for the train function."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ray_fracbackend.report import StartReport
from ray_fracbackend.verify import VerificationResult

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ray_fracbackend.worker.memory_cap import MemoryCap


@dataclass
class WorkerState:
    """State of one process, over all starts in it.

    Attributes:
        store: Rank 0's store between the probe and the start.
        variables: Environment variables that a start has set, with the values that it set.
        memory_cap: The cap on the process's CUDA memory.
        fault_helper: Helper process of the search for a fault.
        load_report: Fetches the report of the last start.
    """

    store: TCPStore | None = None
    variables: dict[str, str] = field(default_factory=dict)
    memory_cap: MemoryCap | None = None
    fault_helper: subprocess.Popen[str] | None = None
    load_report: Callable[[], StartReport] | None = None


STATE = WorkerState()


def publish_report(source: Any, verification: VerificationResult | None) -> None:
    """Make the report of this worker's start available to its train function.

    Args:
        source: The report without figures, or the Ray object that holds it: fetched on first use only.
        verification: The figures.
    """

    def load() -> StartReport:
        if isinstance(source, StartReport):
            return replace(source, verification=verification)
        import ray

        report: StartReport = ray.get(source)
        return replace(report, verification=verification)

    STATE.load_report = load


def get_start_report() -> StartReport | None:
    """Get the report of the start of the calling train function's worker group.

    Returns:
        The report; None where FracTorchConfig started nothing in this process: outside of a train function, under another
        TorchConfig, and where the start was left to Ray Train.
    """
    return STATE.load_report() if STATE.load_report is not None else None
