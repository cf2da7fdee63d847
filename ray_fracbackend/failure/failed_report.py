"""The report of a failed start, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_fracbackend.decide.plan import Decision
from ray_fracbackend.decide.rendezvous import Rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.report import document, now


def failed_start(
    error: Exception,
    settings: Settings,
    workers: Sequence[WorkerInfo],
    decision: Decision | None,
    rendezvous: Rendezvous | None,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Return the report of a failed start, with the keys of `StartReport.to_dict` and ``error``.

    Args:
        error: Error of the start.
        settings: Settings of the start.
        workers: Workers that were probed, by rank; empty if the probe failed.
        decision: The decision, None if the start failed before it.
        rendezvous: The rendezvous, None if the start failed before it.
        seconds: Seconds of each phase.
    """
    return document(now(), settings.to_plain(), workers, decision, rendezvous, None, seconds, _error(error))


def _error(error: Exception) -> dict[str, Any]:
    name = type(error).__name__
    return {
        "reason": getattr(error, "reason", name),
        "kind": getattr(error, "kind", name),
        "step": getattr(error, "step", ""),
        "message": str(error),
        "ranks": list(getattr(error, "ranks", ())),
    }
