"""The start report beside the run's results, with storage that fails or is slow."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from ray_fracbackend.report import file as report_file
from ray_fracbackend.report.file import REPORT_FILE, earlier_start, save_report

REPORT = {"backend": "gloo"}
EARLIER = {"number": 1, "date": "2026-11-30T18:00:00+00:00", "result": "worker_died"}


def group(path, file_system=None):
    """Return a V2 worker group with only its storage."""
    storage = SimpleNamespace(
        storage_filesystem=file_system or LocalFileSystem(), experiment_fs_path=Path(path).as_posix()
    )
    return SimpleNamespace(_storage_context=storage)


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(report_file.logger, "warning", lambda text, *values: found.append(text % values))
    return found


def test_it_is_written_and_replaced(tmp_path, warnings):
    """The folder need not exist; a later start of the run replaces the file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / REPORT_FILE).write_text("old " * 100)
    for name in ("run", "new/run"):
        assert save_report(group(tmp_path / name), REPORT) == (tmp_path / name / REPORT_FILE).as_posix()
        assert json.loads((tmp_path / name / REPORT_FILE).read_text()) == {"backend": "gloo"}
    assert not warnings


def test_the_start_before(tmp_path):
    """Number, date and result of the last start of the run; none without one, and with a file that is no such report."""
    run = group(tmp_path)
    assert earlier_start(run) is None
    for report in ({"ok": False, "error": {"reason": "worker_died"}}, {"ok": True, "earlier": EARLIER}):
        save_report(run, {"date": EARLIER["date"], "earlier": None, **report})
        found = earlier_start(run)
        assert found == ({**EARLIER, "number": 2, "result": "started"} if report["ok"] else EARLIER)
    for report in ({}, {"earlier": {"number": "two"}, "ok": True, "date": ""}, []):
        save_report(run, report)
        assert earlier_start(run) is None


def test_storage_that_refuses(tmp_path, warnings):
    (tmp_path / "run").write_text("a file where the folder should be")
    assert save_report(group(tmp_path / "run"), REPORT) is None
    assert "start_report.json was not written in the results folder: " in warnings[0]


@pytest.mark.linux(reason="limits the size of files")
def test_a_full_disk(tmp_path, warnings):
    """The earlier report stays as it was, and nothing lies beside it."""
    import resource

    (tmp_path / REPORT_FILE).write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert save_report(group(tmp_path), {"backend": "gloo " * 4096}) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "start_report.json was not written in the results folder: " in warnings[0]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_storage_that_hangs(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(report_file, "_SAVE_S", 0.2)
    release = threading.Event()
    save_report(group(tmp_path, SimpleNamespace(create_dir=lambda *_, **__: release.wait())), REPORT)
    assert "is not yet written in the results folder after 0.2 s" in warnings[0]
    release.set()


def test_group_of_no_run(warnings):
    """A worker group without a run has no place for it."""
    assert save_report(SimpleNamespace(), REPORT) is None
    assert not warnings


def test_storage_that_is_not_local(tmp_path, warnings):
    """The path of the file has the kind of the storage with it."""
    remote = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    assert save_report(group("bucket/run", remote), REPORT) == "bucket/run/start_report.json (subtree)"
    assert (tmp_path / "bucket" / "run" / REPORT_FILE).exists()


def test_it_can_be_turned_off(tmp_path, monkeypatch):
    """The report contains addresses and variables."""
    monkeypatch.setenv("RAY_FRACBACKEND_START_REPORT", "0")
    assert save_report(group(tmp_path), REPORT) is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("RAY_FRACBACKEND_START_REPORT", "no")
    with pytest.raises(ValueError, match="RAY_FRACBACKEND_START_REPORT='no': must be 0 or 1"):
        earlier_start(group(tmp_path))
