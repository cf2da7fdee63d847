"""Format a report as a table: plain text, or HTML for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ray_fracbackend.decide.device_sharing import short_uuid
from ray_fracbackend.decide.worker_info import WorkerInfo, version_text

if TYPE_CHECKING:
    from ray_fracbackend.report import StartReport

_COLUMNS = ("rank", "node", "pid", "GPU", "device", "shared with", "NCCL", "check, ms")


def text_of(report: StartReport) -> str:
    """Return the share map as a plain table, then the log line, warnings and hints."""
    rows = [_COLUMNS, *_rows(report)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", report.log_line(), *(f"{kind}: {text}" for kind, text in _remarks(report))])


def html_of(report: StartReport) -> str:
    """Return the same as HTML; values from the nodes are escaped."""
    body = "".join(_line(row, "td") for row in _rows(report))
    items = "".join(f"<li><b>{kind}:</b> {html.escape(text)}</li>" for kind, text in _remarks(report))
    listed = f"<ul>{items}</ul>" if items else ""
    return (
        f"<table><thead>{_line(_COLUMNS, 'th')}</thead><tbody>{body}</tbody></table>"
        f"<p>{html.escape(report.log_line())}</p>{listed}"
    )


def _remarks(report: StartReport) -> list[tuple[str, str]]:
    return [*(("warning", text) for text in report.warnings), *(("hint", text) for text in report.plan.hints)]


def _line(cells: tuple[str, ...], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _rows(report: StartReport) -> list[tuple[str, ...]]:
    sharing = {rank: group.ranks for group in report.plan.share_groups for rank in group.ranks}
    seconds = report.verification.rank_seconds if report.verification else ()
    return [
        (
            str(worker.rank),
            worker.node_ip,
            str(worker.pid),
            f"{worker.gpu_fraction:g}",
            _device(worker),
            ",".join(str(other) for other in sharing.get(worker.rank, ()) if other != worker.rank) or "-",
            version_text(worker.nccl_version) if worker.nccl_version else "-",
            f"{seconds[worker.rank] * 1e3:.2f}" if worker.rank < len(seconds) else "-",
        )
        for worker in report.workers
    ]


def _device(worker: WorkerInfo) -> str:
    if worker.device is not None:
        return f"{short_uuid(worker.device.uuid)} {worker.device.name}"
    # The reason contains the cause.
    return "cpu (no CUDA)" if worker.cuda_missing else "cpu"
