"""Report of a start as a log line, a table, JSON or a notebook table. Driver and workers."""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from ray_fracbackend import __version__
from ray_fracbackend.decide.device_sharing import short_uuid
from ray_fracbackend.decide.plan import StartPlan
from ray_fracbackend.decide.rendezvous import Rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo, version_text
from ray_fracbackend.verify import VerificationResult

# Of the JSON document: raised where a key goes or changes its meaning, not where one is added.
SCHEMA_VERSION = 1
_COLUMNS = ("rank", "node", "pid", "GPU", "device", "shared with", "NCCL", "check, ms")


def now() -> str:
    """Return the current time, UTC in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def failed_start(
    error: Exception,
    settings: Settings,
    workers: Sequence[WorkerInfo],
    plan: StartPlan | None,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Return the report of a start that failed, with the keys of `StartReport.to_dict` and ``error``.

    Args:
        error: Why it failed.
        settings: Its settings.
        workers: Those that were probed, by rank; empty where the probe failed.
        plan: The decision, None where there was none yet.
        seconds: Seconds of each phase.
    """
    rendezvous = plan.rendezvous if plan else None
    cause = {
        "reason": getattr(error, "reason", type(error).__name__),
        "message": str(error),
        "ranks": list(getattr(error, "ranks", ())),
    }
    return {
        **_head(False, now(), settings.to_plain(), workers),
        "error": cause,
        "backend": plan.backend if plan else None,
        "plan": _plan_dict(plan) if plan else None,
        "rendezvous": asdict(rendezvous) if rendezvous else None,
        "init_method": settings.init_method,
        "master_addr": rendezvous.master_addr if rendezvous else None,
        "master_port": rendezvous.master_port if rendezvous else None,
        "workers": [asdict(worker) for worker in workers],
        "verification": None,
        "seconds": dict(seconds),
    }


def _head(ok: bool, date: str, settings: Mapping[str, Any], workers: Sequence[WorkerInfo]) -> dict[str, Any]:
    versions = {"ray_fracbackend": __version__, "python": platform.python_version()}
    if workers:
        versions |= {"ray": workers[0].ray_version, "torch": workers[0].torch_version}
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": ok,
        "date": date,
        "versions": versions,
        "settings": dict(settings),
    }


def _plan_dict(plan: StartPlan) -> dict[str, Any]:
    values = asdict(replace(plan, rendezvous=None))
    del values["rendezvous"]
    values["share_groups"] = [
        {"ranks": list(group.ranks), "device_uuid": group.device.uuid, "nodes": list(group.nodes), "text": group.text}
        for group in plan.share_groups
    ]
    return values


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """One start of a worker group.

    Attributes:
        plan: The decision and the rendezvous, with reasons, hints and warnings.
        workers: Devices and network of every rank, in rank order.
        verification: Figures of the collective check, None where it was switched off.
        seconds: Seconds of each phase on the driver (``probe``, ``start``); empty in the workers' copy.
        settings: Settings of FracTorchConfig, as plain values.
        date: When the start was decided, UTC in ISO 8601.
    """

    plan: StartPlan
    workers: tuple[WorkerInfo, ...]
    verification: VerificationResult | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=now)

    @property
    def backend(self) -> str:
        """Backend of the process group."""
        return self.plan.backend

    @property
    def rendezvous(self) -> Rendezvous:
        """Rendezvous of the ranks."""
        assert self.plan.rendezvous is not None  # a report is made of whole plans
        return self.plan.rendezvous

    @property
    def init_method(self) -> str:
        """``env`` or ``tcp``."""
        return self.rendezvous.init_method

    @property
    def master_addr(self) -> str:
        """Address of rank 0's store."""
        return self.rendezvous.master_addr

    @property
    def master_port(self) -> int:
        """Port of rank 0's store."""
        return self.rendezvous.master_port

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of plan and rendezvous, one line each."""
        return (*self.plan.warnings, *self.rendezvous.warnings)

    @property
    def path(self) -> str | None:
        """How tensors of the devices travel where the backend has several ways, as its verification found; else None."""
        return self.verification.path if self.verification else None

    @property
    def reason(self) -> str:
        """Reason for the backend, in one line."""
        return self.plan.reason

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reason for the backend, reason for the rendezvous, path of the tensors, then every warning and hint."""
        path = (self.path,) if self.path else ()
        return (self.plan.reason, self.rendezvous.reason, *path, *self.warnings, *self.plan.hints)

    def log_line(self) -> str:
        """Return the line for the log: decision, world size, verification."""
        size = f"{len(self.workers)} worker{'s' if len(self.workers) != 1 else ''}"
        checked = "not verified"
        if (figures := self.verification) is not None:
            checked = (
                f"verified in {figures.total_s * 1e3:.0f} ms: all_reduce {figures.latency_s * 1e3:.2f} ms at 1 KiB, "
                f"{figures.bandwidth_bytes_per_s / 1e6:.0f} MB/s at 1 MiB"
            )
            checked += f", {figures.path}" if figures.path else ""
        return f"{self.reason} [{size}, {self.rendezvous.reason}, {checked}]"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that ``json.dumps`` takes; ``schema_version`` is `SCHEMA_VERSION`."""
        return {
            **_head(True, self.date, self.settings, self.workers),
            "backend": self.backend,
            "plan": _plan_dict(self.plan),
            "rendezvous": asdict(self.rendezvous),
            "init_method": self.init_method,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "workers": [asdict(worker) for worker in self.workers],
            "verification": asdict(self.verification) if self.verification else None,
            "seconds": dict(self.seconds),
        }

    def to_json(self) -> str:
        """Return the report as one JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self) -> str:
        """Return the share map as a plain table, then the reasons."""
        rows = [_COLUMNS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(
            [
                *lines,
                "",
                self.log_line(),
                *(f"warning: {w}" for w in self.warnings),
                *(f"hint: {hint}" for hint in self.plan.hints),
            ]
        )

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        def line(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(row, "td") for row in self._rows())
        marked = [*(("warning", text) for text in self.warnings), *(("hint", text) for text in self.plan.hints)]
        items = "".join(f"<li><b>{kind}:</b> {html.escape(text)}</li>" for kind, text in marked)
        listed = f"<ul>{items}</ul>" if items else ""
        return (
            f"<table><thead>{line(_COLUMNS, 'th')}</thead><tbody>{body}</tbody></table>"
            f"<p>{html.escape(self.log_line())}</p>{listed}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        sharing = {rank: group.ranks for group in self.plan.share_groups for rank in group.ranks}
        seconds = self.verification.rank_seconds if self.verification else ()
        return [
            (
                str(worker.rank),
                worker.node_ip,
                str(worker.pid),
                f"{worker.gpu_fraction:g}",
                _device_text(worker),
                ",".join(str(other) for other in sharing.get(worker.rank, ()) if other != worker.rank) or "-",
                version_text(worker.nccl_version) if worker.nccl_version else "-",
                f"{seconds[worker.rank] * 1e3:.2f}" if worker.rank < len(seconds) else "-",
            )
            for worker in self.workers
        ]


def _device_text(worker: WorkerInfo) -> str:
    if worker.device is not None:
        return f"{short_uuid(worker.device.uuid)} {worker.device.name}"
    # Without the evidence and the advice, which are in the reason.
    cause = (worker.cuda_missing or "").partition(" (")[0].partition("; ")[0]
    return f"cpu ({cause})" if cause else "cpu"
