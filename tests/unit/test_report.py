"""Formats of the report: log line, table, JSON, HTML."""

import json
import re
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from ray_fracbackend import __version__
from ray_fracbackend.decide.plan import StartPlan
from ray_fracbackend.decide.rendezvous import Rendezvous
from ray_fracbackend.decide.settings import Settings, setting_names
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.errors import VerificationError
from ray_fracbackend.failure.failed_report import failed_start
from ray_fracbackend.report import StartReport
from ray_fracbackend.verify_result import VerificationResult
from ray_fracbackend.worker.state import STATE, get_start_report
from tests.unit.builders import gpu, job

FIGURES = VerificationResult(
    backend="gloo",
    device="cuda:0",
    world_size=2,
    latency_s=0.0002,
    bandwidth_bytes_per_s=5e8,
    rank_seconds=(0.002, 0.003),
    total_s=0.012,
)


@pytest.fixture
def start_report():
    workers = tuple(job(gpu("ab12cd34-56<b>"), gpu("ab12cd34-56<b>")))
    decision = decide_start(workers, Settings())
    rendezvous = Rendezvous(
        master_addrs=("10.0.0.1", "10.0.0.1"),
        master_port=29500,
        init_method="env",
        one_node=True,
        uses_gloo=True,
        reason="rank 0 at 10.0.0.1:29500 (one node)",
        warnings=("a doubt about the network",),
    )
    settings = Settings(master_port=(29500, 29600)).to_plain()
    return StartReport(
        plan=StartPlan.of(decision, rendezvous), workers=workers, verification=FIGURES, settings=settings
    )


def test_log_line(start_report):
    """One line with the shared devices, the decision, the reason and the measurements."""
    assert start_report.log_line() == (
        "ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.1: using gloo (NCCL 2.28.9 refuses shared devices) "
        "[2 workers, rank 0 at 10.0.0.1:29500 (one node), verified in 12 ms: all_reduce 0.20 ms at 1 KiB, 500 MB/s at 1 MiB]"
    )


def test_path_of_the_tensors(start_report):
    """If the backend has several ways for CUDA tensors, line, reasons and JSON contain the way and the reason."""
    path = "staged through host memory (rank 1: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT)"
    report = replace(start_report, verification=replace(FIGURES, path=path))
    assert report.log_line().endswith(f"500 MB/s at 1 MiB, {path}]")
    assert report.path in report.reasons
    assert json.loads(report.to_json())["verification"]["path"] == path
    assert (start_report.path, replace(start_report, verification=None).path) == (None, None)


def test_text_table(start_report):
    """One row per rank with device, sharing ranks and time, then the warnings."""
    text = start_report.to_text()
    assert re.search(r"^0 +10\.0\.0\.1 +0 +0\.5 +GPU-ab12cd34 NVIDIA H200 +1 +2\.28\.9 +2\.00$", text, re.MULTILINE)
    assert "warning: a doubt about the network" in text
    assert "warning: 2 of 2 ranks share a GPU" in text
    assert "LOCAL_RANK" not in text


def test_json(start_report):
    """The whole report as JSON, with full UUIDs."""
    data = json.loads(start_report.to_json())
    assert data["backend"] == "gloo"
    assert (data["init_method"], data["master_addr"], data["master_port"]) == ("env", "10.0.0.1", 29500)
    assert data["rendezvous"]["reason"] == "rank 0 at 10.0.0.1:29500 (one node)"
    assert data["workers"][1]["devices"][0]["uuid"] == "GPU-ab12cd34-56<b>"
    assert data["plan"]["share_groups"][0]["ranks"] == [0, 1]
    assert data["verification"]["world_size"] == 2


def test_json_has_schema_versions_and_settings(start_report):
    """Schema version, date, versions and settings."""
    data = json.loads(start_report.to_json())
    assert (data["schema_version"], data["ok"]) == (2, True)
    assert datetime.fromisoformat(data["date"]).utcoffset() == timedelta(0)
    assert data["versions"]["ray_fracbackend"] == __version__
    assert set(data["versions"]) == {"ray_fracbackend", "python", "ray", "torch"}
    assert data["settings"]["master_port"] == [29500, 29600]
    assert set(data["settings"]) == set(setting_names())


def test_json_of_a_failed_start(start_report):
    """The same first keys, the error, and everything that was known then."""
    error = VerificationError(
        "all_reduce stalled.", advice="Look at rank 1.", ranks=[1], kind="stalled", step="barrier"
    )
    data = json.loads(
        json.dumps(
            failed_start(
                error,
                Settings(),
                start_report.workers,
                start_report.plan,
                start_report.rendezvous,
                {"probe": 1.0},
            )
        )
    )
    assert (data["schema_version"], data["ok"]) == (2, False)
    assert data["error"] == {
        "reason": "verification",
        "kind": "stalled",
        "step": "barrier",
        "message": str(error),
        "ranks": [1],
    }
    assert (data["backend"], data["plan"]["reason"]) == ("gloo", start_report.reason)
    assert data["rendezvous"]["master_port"] == 29500
    assert len(data["workers"]) == 2
    shared = set(json.loads(start_report.to_json())) & set(data)
    assert {"schema_version", "ok", "date", "versions", "settings", "backend", "plan", "workers", "seconds"} <= shared


def test_json_of_a_probe_that_failed():
    """Nothing is known of any worker."""
    data = failed_start(OSError("no such host"), Settings(), (), None, None, {})
    assert (data["error"]["reason"], data["backend"], data["plan"], data["workers"]) == ("OSError", None, None, [])


def test_print_is_the_table(start_report):
    """print(report) shows the table, repr() the dataclass."""
    assert str(start_report) == start_report.to_text()
    assert "StartReport(" in repr(start_report)


def test_html_marks_warnings_and_hints(start_report):
    """The log line is a paragraph with the measurements; warnings and hints are a list with their kind."""
    hinted = replace(start_report, plan=replace(start_report.plan, hints=("use 1/2",)))
    html = hinted._repr_html_()
    assert "<li><b>warning:</b> a doubt about the network</li>" in html
    assert "<li><b>hint:</b> use 1/2</li>" in html
    assert re.search(r"<p>ranks 0,1 share .* verified in 12 ms: .*</p>", html)
    bare = replace(
        hinted, plan=replace(hinted.plan, hints=(), warnings=(), rendezvous=replace(hinted.rendezvous, warnings=()))
    )
    assert "<ul>" not in bare._repr_html_()


def test_html_is_escaped(start_report):
    """The notebook table shows the share map and escapes values from the nodes."""
    object.__setattr__(start_report.workers[0], "node_ip", "<script>")
    html = start_report._repr_html_()
    assert "<td>&lt;script&gt;</td>" in html
    assert "<script>" not in html


def test_no_report_outside_of_a_start(monkeypatch):
    """If our start did not run, also if it was left to Ray, train functions receive None and no error."""
    monkeypatch.setattr(STATE, "report", None)
    assert get_start_report() is None


def test_published_report_has_this_workers_figures(start_report, monkeypatch):
    """A train function receives the start's report with the verification of its own group."""
    monkeypatch.setattr("ray.get", lambda reference: start_report)
    monkeypatch.setattr(STATE, "report", ("reference", None))
    assert get_start_report().verification is None
    assert get_start_report().backend == "gloo"
