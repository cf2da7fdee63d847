"""Copies of checkpoints that wait for each other."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
from ray.train.torch import TorchConfig

from ray_fracbackend import FracTorchConfig, _ray
from ray_fracbackend.checkpoints import turns as checkpoint_turns
from ray_fracbackend.checkpoints.turns import TURNS_ENV, copy_checkpoints_in_turn, copy_in_turn
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.log import logger

_STORAGES = {False: "ray.train._internal.storage", True: "ray.train.v2._internal.execution.storage"}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the locks in a folder of the test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Ray's module that copies files, without our patch, for each engine."""
    try:
        module = importlib.import_module(_STORAGES[request.param])
    except ModuleNotFoundError:
        pytest.skip("this Ray has no V2 engine")
    copy_files = module._pyarrow_fs_copy_files
    monkeypatch.setattr(module, "_pyarrow_fs_copy_files", getattr(copy_files, "__wrapped__", copy_files))
    monkeypatch.setattr(_ray, "v2_enabled", lambda: request.param)
    return module


def hold(folder: str, temporary_folder: str, has_lock: Any, may_end: Any) -> None:
    tempfile.tempdir = temporary_folder
    copy_in_turn(folder, lambda: (has_lock.set(), may_end.wait(60)))


@pytest.mark.full(but="win32")
def test_processes_take_turns_by_folder(temporary: Path) -> None:
    """A process waits for another that copies to the same folder, but not for one with another folder or a dead one."""
    context = multiprocessing.get_context("spawn")
    has_lock, may_end, done = context.Event(), context.Event(), threading.Event()
    process = context.Process(target=hold, args=("there", str(temporary), has_lock, may_end))
    process.start()

    def elsewhere() -> None:
        waiting.start()
        assert not done.wait(0.5)

    waiting = threading.Thread(target=copy_in_turn, args=("there", done.set), daemon=True)
    try:
        assert has_lock.wait(60)
        copy_in_turn("elsewhere", elsewhere)
    finally:
        process.kill()
        process.join()
    assert done.wait(60)
    waiting.join()


def test_the_wait_for_a_turn_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that hangs in its copy does not stop the others: they copy and log a warning."""
    assert Settings().timeout_s > checkpoint_turns._TURN_S  # the other ranks wait in their next collective
    monkeypatch.setattr(checkpoint_turns, "_TURN_S", 0.1)
    with caplog.at_level(logging.WARNING, logger.name):
        copy_in_turn("there", lambda: copy_in_turn("there", list))
    assert "copying a checkpoint to there without waiting for other workers" in caplog.text
    caplog.clear()
    copy_in_turn("there", list)
    assert not caplog.text  # both are free again


def test_a_copy_without_a_folder_for_locks(temporary: Path) -> None:
    temporary.rmdir()
    assert copy_in_turn("there", lambda: "copied") == "copied"


class HeldError(PermissionError):
    """Error of a file that another program holds, as Python raises it on Windows."""

    winerror = 32


@pytest.mark.parametrize("num_failures", [1, 99])
def test_a_held_file_is_copied_again(
    num_failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A virus scanner or OneDrive opens a new file for a moment; the error comes if it stays, and at once if it is another one."""
    monkeypatch.setattr(checkpoint_turns.time, "sleep", lambda s: None)
    caplog.set_level(logging.WARNING, logger.name)
    errors: list[OSError] = [HeldError()] * num_failures

    def copy() -> str:
        if errors:
            raise errors.pop()
        return "copied"

    if num_failures == 1:
        assert copy_in_turn("there", copy) == "copied"
    else:
        with pytest.raises(HeldError):
            copy_in_turn("there", copy)
    assert "a virus scanner, OneDrive or another program may hold the file" in caplog.text
    errors = [PermissionError()] * 2
    with pytest.raises(PermissionError):
        copy_in_turn("there", copy)
    assert len(errors) == 1


def test_ray_copies_to_a_local_folder_inside(storage: Any, tmp_path: Path) -> None:
    """The folder is passed, the files are copied, and a second call does not wrap twice."""
    for folder in ("source", "destination"):  # Ray creates both before
        (tmp_path / folder).mkdir()
    (tmp_path / "source" / "model.pt").write_text("weights")
    entered = []

    def call(folder: str, copy: Any) -> Any:
        entered.append(folder)
        return copy()

    for _ in range(2):
        _ray.wrap_checkpoint_copies(call)
    local = pyarrow.fs.LocalFileSystem()
    source, destination = str(tmp_path / "source"), str(tmp_path / "destination")
    storage._pyarrow_fs_copy_files(
        source=source, destination=destination, source_filesystem=local, destination_filesystem=local
    )
    assert entered == [destination]
    assert (tmp_path / "destination" / "model.pt").read_text() == "weights"


@pytest.mark.parametrize("destination_filesystem", [None, SimpleNamespace(type_name="s3")])
def test_other_copies_do_not_wait(storage: Any, destination_filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads, and uploads to an object store, do not wait, because no process holds a file open there."""
    copied = []
    monkeypatch.setattr(storage, "_pyarrow_fs_copy_files", lambda *args, **options: copied.append((args, options)))
    _ray.wrap_checkpoint_copies(lambda folder, copy: pytest.fail(f"waited for {folder}"))
    storage._pyarrow_fs_copy_files("a", "b", destination_filesystem=destination_filesystem, use_threads=False)
    assert copied == [(("a", "b", None, destination_filesystem), {"use_threads": False})]


def test_a_ray_without_the_name_is_a_warning(
    storage: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues as with stock, and the warning states what to do."""
    monkeypatch.delattr(storage, "_pyarrow_fs_copy_files")
    with caplog.at_level(logging.WARNING, logger.name):
        copy_checkpoints_in_turn()
    assert "WinError 32" in caplog.text
    assert "report_rank0" in caplog.text


@pytest.mark.parametrize(("platform", "takes_turns"), [("win32", True), ("linux", False), ("darwin", False)])
def test_workers_take_turns_on_windows(platform: str, takes_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take turns from the start of the training on; on other systems Ray's copy is unchanged."""
    calls: list[Any] = []
    group = SimpleNamespace(execute=calls.append)
    monkeypatch.setattr(TorchConfig().backend_cls, "on_training_start", lambda *_: calls.append("stock"))
    monkeypatch.setattr(sys, "platform", platform)
    FracTorchConfig().backend_cls().on_training_start(group, FracTorchConfig())
    assert calls == ["stock", *([copy_checkpoints_in_turn] if takes_turns else [])]


@pytest.mark.parametrize(("value", "wraps"), [(None, True), ("1", True), ("0", False)])
def test_the_switch(value: str | None, wraps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(_ray, "wrap_checkpoint_copies", calls.append)
    if value is not None:
        monkeypatch.setenv(TURNS_ENV, value)
    copy_checkpoints_in_turn()
    assert bool(calls) is wraps
    monkeypatch.setenv(TURNS_ENV, "no")
    with pytest.raises(ValueError, match=f"{TURNS_ENV}='no': must be 0 or 1"):
        copy_checkpoints_in_turn()
