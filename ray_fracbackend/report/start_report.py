"""Start report: its log line and its JSON. Driver and workers."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any

from ray_fracbackend import __version__
from ray_fracbackend.decide.device_sharing import short_uuid
from ray_fracbackend.decide.plan import Decision, StartPlan
from ray_fracbackend.decide.rendezvous import Rendezvous
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text
from ray_fracbackend.shown import printable
from ray_fracbackend.verify.result import VerificationResult

# Schema version of the JSON document. Increase it if a key is removed or changes its meaning, not if one is added.
SCHEMA_VERSION = 4


def now() -> str:
    """Return the current time, UTC in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(kw_only=True)
class Progress:
    """What is known of a start so far; the attributes are as in `StartReport`."""

    settings: Mapping[str, Any]
    decision: Decision | None = None
    rendezvous: Rendezvous | None = None
    workers: tuple[WorkerInfo, ...] = ()
    verification: VerificationResult | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    date: str = field(default_factory=now)
    earlier: Mapping[str, Any] | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the decision and of the rendezvous, as far as they exist."""
        return tuple(warning for source in (self.decision, self.rendezvous) if source for warning in source.warnings)


def document(start: Progress | StartReport, error: Exception | None = None) -> dict[str, Any]:
    """Return the report of a start as plain values.

    Args:
        start: The start, finished or failed.
        error: The error of a failed start.
    """
    rendezvous, workers = start.rendezvous, start.workers
    versions = {"ray_fracbackend": __version__, "python": platform.python_version()}
    if workers:
        versions |= {"ray": workers[0].ray_version, "torch": workers[0].torch_version}
    values = {
        "schema_version": SCHEMA_VERSION,
        "ok": error is None,
        "date": start.date,
        "earlier": start.earlier,
        "versions": versions,
        "settings": dict(start.settings),
        **({"error": _error(error)} if error is not None else {}),
        "backend": start.decision.backend if start.decision else None,
        "plan": _decision(start.decision) if start.decision else None,
        "rendezvous": asdict(rendezvous) if rendezvous else None,
        "init_method": rendezvous.init_method if rendezvous else start.settings["init_method"],
        "master_addr": rendezvous.master_addr if rendezvous else None,
        "master_port": rendezvous.master_port if rendezvous else None,
        "workers": [asdict(worker) for worker in workers],
        "verification": asdict(start.verification) if start.verification else None,
        "seconds": dict(start.seconds),
    }
    return dict(printable(values))


def _error(error: Exception) -> dict[str, Any]:
    name = type(error).__name__
    return {
        "reason": getattr(error, "reason", name),
        "kind": getattr(error, "kind", name),
        "step": getattr(error, "step", ""),
        "message": str(error),
        "ranks": list(getattr(error, "ranks", ())),
    }


def _decision(decision: Decision) -> dict[str, Any]:
    values = {each.name: getattr(decision, each.name) for each in fields(Decision)}
    values["env_defaults"] = dict(decision.env_defaults)
    values["share_groups"] = [
        {"ranks": list(group.ranks), "device_uuid": group.device.uuid, "nodes": list(group.nodes), "text": group.text}
        for group in decision.share_groups
    ]
    return values


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """One start of a worker group.

    Attributes:
        plan: ``plan.decision`` and ``plan.rendezvous``, with reasons, hints and warnings.
        workers: Devices and network of every rank, in rank order.
        verification: Measurements of the verification, None if it is off.
        seconds: Seconds of each phase on the driver (``probe``, ``start``); empty in the workers' copy.
        settings: Settings of FracTorchConfig, as plain values.
        date: Time when the report was created, UTC in ISO 8601.
        earlier: ``number``, ``date`` and ``result`` of the run's last start before this one; None for the first start.
    """

    plan: StartPlan
    workers: tuple[WorkerInfo, ...]
    verification: VerificationResult | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=now)
    earlier: Mapping[str, Any] | None = None

    def with_figures(
        self, verification: VerificationResult | None, seconds: Mapping[str, float] | None = None
    ) -> StartReport:
        """Return the report with the results of the finished start."""
        return replace(self, verification=verification, seconds=dict(seconds or {}))

    @property
    def decision(self) -> Decision:
        """Backend and devices, with reasons."""
        return self.plan.decision

    @property
    def backend(self) -> str:
        """Backend of the process group."""
        return self.plan.decision.backend

    @property
    def rendezvous(self) -> Rendezvous:
        """Rendezvous of the ranks."""
        return self.plan.rendezvous

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of plan and rendezvous, one line each."""
        return (*self.plan.decision.warnings, *self.rendezvous.warnings)

    @property
    def path(self) -> str | None:
        """Path of device tensors, as reported by the verification, if the backend has several paths; else None."""
        return self.verification.path if self.verification else None

    @property
    def reason(self) -> str:
        """Reason for the backend, in one line."""
        return self.plan.decision.reason

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reason for the backend, reason for the rendezvous, path of the tensors, then all warnings and hints."""
        path = (self.path,) if self.path else ()
        return (self.reason, self.rendezvous.reason, *path, *self.warnings, *self.plan.decision.hints)

    def log_line(self) -> str:
        """Return the log line: decision, world size, verification, seconds of each step."""
        size = f"{len(self.workers)} worker{'s' if len(self.workers) != 1 else ''}"
        checked = "not verified"
        if (figures := self.verification) is not None:
            checked = f"verified in {figures.total_s * 1e3:.0f} ms: {figures.speed}"
            checked += f", {figures.path}" if figures.path else ""
        if self.seconds:
            verify_s = figures.total_s if figures else 0.0
            connect_s = self.seconds["start"] - verify_s
            checked += f"; seconds: probe {self.seconds['probe']:.2f}, connect {connect_s:.2f}, verify {verify_s:.2f}"
        if earlier := self.earlier:
            checked += (
                f"; start {earlier['number'] + 1} of this run, after that of {earlier['date']} ({earlier['result']})"
            )
        return f"{self.reason} [{size}, {self.rendezvous.reason}, {checked}]"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for ``json.dumps``; ``schema_version`` is `SCHEMA_VERSION`."""
        return document(self)

    def to_json(self) -> str:
        """Return the report as one JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self) -> str:
        """Return one line for each rank with its device and the ranks that share it, the log line, warnings and hints."""
        sharing = {rank: group.ranks for group in self.plan.decision.share_groups for rank in group.ranks}
        lines = []
        for worker in self.workers:
            device = f"{short_uuid(worker.device.uuid)} {worker.device.name}" if worker.device else "cpu"
            others = [rank for rank in sharing.get(worker.rank, ()) if rank != worker.rank]
            shared = f", shared with {ranks_text(others)}" if others else ""
            lines.append(f"{worker.where}: {worker.gpu_fraction:g} GPU, {device}{shared}")
        lines += ["", self.log_line(), *(f"warning: {warning}" for warning in self.warnings)]
        return str(printable("\n".join([*lines, *(f"hint: {hint}" for hint in self.plan.decision.hints)])))

    def __str__(self) -> str:
        return self.to_text()
