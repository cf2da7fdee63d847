"""The start report beside the run's results, with storage that fails or is slow."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from ray_fracbackend.report import file as report_file
from ray_fracbackend.report.file import REPORT_FILE, save_report

REPORT = {"backend": "gloo"}


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


def test_storage_that_refuses(tmp_path, warnings):
    (tmp_path / "run").write_text("a file where the folder should be")
    assert save_report(group(tmp_path / "run"), REPORT) is None
    assert "start_report.json was not written in the results folder: " in warnings[0]


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
