"""Formats of the report: log line, table, JSON, HTML."""

import json
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from ray_fracbackend import __version__
from ray_fracbackend.decide.plan import StartPlan
from ray_fracbackend.decide.rendezvous import Rendezvous
from ray_fracbackend.decide.settings import Settings, setting_names
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.errors import VerificationError
from ray_fracbackend.report.start_report import Progress, StartReport, document
from ray_fracbackend.verify.result import VerificationResult
from ray_fracbackend.worker.state import STATE, get_start_report
from tests.unit.builders import gpu, job, worker

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
    workers = tuple(job(gpu("ab12cd34-56"), gpu("ab12cd34-56")))
    decision = decide_start(workers, Settings())
    rendezvous = Rendezvous(
        master_addrs=("10.0.0.1", "10.0.0.1"),
        master_port=29500,
        init_method="env",
        one_node=True,
        reason="rank 0 at 10.0.0.1:29500 (one node)",
        warnings=("a doubt about the network",),
    )
    settings = Settings(master_port=(29500, 29600)).to_plain()
    return StartReport(plan=StartPlan(decision, rendezvous), workers=workers, verification=FIGURES, settings=settings)


def test_log_line(start_report):
    size = "2 workers, rank 0 at 10.0.0.1:29500 (one node)"
    checked = "verified in 12 ms: all_reduce 0.20 ms at 1 KiB, 500 MB/s at 1 MiB"
    assert start_report.log_line() == f"{start_report.reason} [{size}, {checked}]"
    earlier = {"number": 1, "date": "2026-11-30T18:00:00+00:00", "result": "worker_died"}
    again = replace(start_report, seconds={"probe": 1.25, "start": 0.5}, earlier=earlier)
    assert again.log_line().endswith(
        "500 MB/s at 1 MiB; seconds: probe 1.25, connect 0.49, verify 0.01; start 2 of this run, after that of "
        "2026-11-30T18:00:00+00:00 (worker_died)]"
    )


def test_path_of_the_tensors(start_report):
    """If the backend has several ways for CUDA tensors, line, reasons and JSON contain the way and the reason."""
    path = "staged through host memory (rank 1: cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT)"
    report = replace(start_report, verification=replace(FIGURES, path=path))
    assert report.log_line().endswith(f"500 MB/s at 1 MiB, {path}]")
    assert report.path in report.reasons
    assert json.loads(report.to_json())["verification"]["path"] == path
    assert (start_report.path, replace(start_report, verification=None).path) == (None, None)


def test_json(start_report):
    """The whole report, with full UUIDs, schema version, date, versions and settings."""
    data = json.loads(start_report.to_json())
    assert (data["schema_version"], data["ok"], data["backend"]) == (4, True, "gloo")
    assert (data["init_method"], data["master_addr"], data["master_port"]) == ("env", "10.0.0.1", 29500)
    assert data["rendezvous"]["reason"] == "rank 0 at 10.0.0.1:29500 (one node)"
    assert data["workers"][1]["devices"][0]["uuid"] == "GPU-ab12cd34-56"
    assert data["plan"]["share_groups"][0]["ranks"] == [0, 1]
    assert data["verification"]["world_size"] == 2
    assert datetime.fromisoformat(data["date"]).utcoffset() == timedelta(0)
    assert data["versions"]["ray_fracbackend"] == __version__
    assert set(data["versions"]) == {"ray_fracbackend", "python", "ray", "torch"}
    assert data["settings"]["master_port"] == [29500, 29600]
    assert set(data["settings"]) == set(setting_names())


def test_json_of_a_failed_start(start_report):
    """The same first keys, the error, and everything that was known then."""
    error = VerificationError("all_reduce stalled.", advice="Look.", ranks=[1], kind="stalled", step="barrier")
    progress = Progress(
        settings=Settings().to_plain(),
        workers=start_report.workers,
        decision=start_report.decision,
        rendezvous=start_report.rendezvous,
        seconds={"probe": 1.0},
    )
    data = json.loads(json.dumps(document(progress, error)))
    assert (data["schema_version"], data["ok"]) == (4, False)
    said = {"reason": "verification", "kind": "stalled", "step": "barrier", "message": str(error), "ranks": [1]}
    assert data["error"] == said
    assert (data["backend"], data["plan"]["reason"]) == ("gloo", start_report.reason)
    assert data["rendezvous"]["master_port"] == 29500
    assert len(data["workers"]) == 2
    shared = set(json.loads(start_report.to_json())) & set(data)
    assert {"date", "versions", "settings", "seconds"} <= shared


def test_json_of_a_probe_that_failed():
    """Nothing is known of any worker."""
    data = document(Progress(settings=Settings().to_plain()), OSError("no such host"))
    assert (data["error"]["reason"], data["backend"], data["plan"], data["workers"]) == ("OSError", None, None, [])


def test_print(start_report):
    """A line for each rank with its device and who shares it, then the log line, warnings and hints; repr() is the dataclass."""
    decision = replace(start_report.plan.decision, hints=("use 1/2",))
    hinted = replace(start_report, plan=replace(start_report.plan, decision=decision))
    assert str(hinted).splitlines() == [
        "rank 0 (node 10.0.0.1, pid 0): 0.5 GPU, GPU-ab12cd34 NVIDIA H200, shared with rank 1",
        "rank 1 (node 10.0.0.1, pid 0): 0.5 GPU, GPU-ab12cd34 NVIDIA H200, shared with rank 0",
        "",
        hinted.log_line(),
        *(f"warning: {warning}" for warning in hinted.warnings),
        "hint: use 1/2",
    ]
    assert "warning: a doubt about the network" in str(hinted)
    assert str(replace(start_report, workers=(worker(2),))).startswith("rank 2 (node 10.0.0.1, pid 0): 0 GPU, cpu\n")
    assert "StartReport(" in repr(start_report)


def test_no_report_outside_of_a_start(monkeypatch):
    monkeypatch.setattr(STATE, "report", None)
    assert get_start_report() is None


def test_published_report_has_this_workers_figures(start_report, monkeypatch):
    """A train function receives the start's report with the verification of its own group."""
    monkeypatch.setattr("ray.get", lambda reference: start_report)
    monkeypatch.setattr(STATE, "report", ("reference", None))
    assert get_start_report().verification is None
    assert get_start_report().backend == "gloo"
