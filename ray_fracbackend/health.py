"""A start as a health result, in the shape of Ray's coming ``ray.train.health.ProbeResult``. Needs no Ray.

The shape is that of ray-project/enhancements, "Ray Train Monitoring and Diagnostics" ``metrics``, ``devices``,
``events``, ``passed``, ``detail``. Its content stays outside of Ray, so an adapter is ``ProbeResult(**asdict(health_result(report)))``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_fracbackend.errors import FracBackendError
from ray_fracbackend.report import StartReport
from ray_fracbackend.verify import VerificationResult


@dataclass(frozen=True, kw_only=True)
class HealthResult:
    """What one check found.

    Attributes:
        metrics: Figures by name; units are part of the names.
        devices: Figures by device UUID.
        events: What should be looked at, one line each.
        passed: Whether the check passed, None where nothing was checked.
        detail: The outcome in one line.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    devices: dict[str, dict[str, float]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    passed: bool | None = None
    detail: str = ""


def health_result(source: StartReport | VerificationResult | FracBackendError) -> HealthResult:
    """The health result of a start, of a verification alone, or of the error that either ended in.

    Args:
        source: From ``get_start_report()`` or ``verify_process_group()``, or what they or a start raised.
    """
    if isinstance(source, FracBackendError):
        ranks = {"num_ranks_at_fault": float(len(source.ranks))} if source.ranks else {}
        return HealthResult(metrics=ranks, events=[source.reason], passed=False, detail=str(source))
    if isinstance(source, VerificationResult):
        size = f"{source.world_size} rank{'s' if source.world_size != 1 else ''}"
        detail = f"{source.backend} on {source.device}: {size} verified in {source.total_s * 1e3:.0f} ms"
        return HealthResult(metrics=_figures(source), passed=True, detail=detail)
    figures = source.verification
    return HealthResult(
        metrics={"world_size": float(len(source.workers)), **(_figures(figures) if figures else {})},
        devices=_devices(source),
        events=list(source.warnings),
        passed=True if figures else None,
        detail=source.log_line(),
    )


def _figures(figures: VerificationResult) -> dict[str, float]:
    return {
        "world_size": float(figures.world_size),
        "all_reduce_latency_s": figures.latency_s,
        "all_reduce_bandwidth_bytes_per_s": figures.bandwidth_bytes_per_s,
        "verification_s": figures.total_s,
        "slowest_rank_s": max(figures.rank_seconds),
    }


def _devices(report: StartReport) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for worker in report.workers:
        if worker.device is not None:
            device = found.setdefault(worker.device.uuid, {"num_ranks": 0.0, "gpu_fraction": 0.0})
            device["num_ranks"] += 1
            device["gpu_fraction"] += worker.gpu_fraction
            device["total_memory_bytes"] = float(worker.device.total_memory_bytes)
    return found
