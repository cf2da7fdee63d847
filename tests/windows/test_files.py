"""Files that are open, mapped, or being copied: Windows' refusals, with the errors of Python, torch and pyarrow."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pyarrow import fs

from tests.processes import under_wine

pytestmark = pytest.mark.windows(reason="Windows' sharing of files")

SHARING_VIOLATION, ACCESS_DENIED, USER_MAPPED_FILE = 32, 5, 1224
_READ, _WRITE = 0x80000000, 0x40000000
_OPEN_EXISTING = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder name with blanks and non-ASCII letters, as in many users' names."""
    made = tmp_path / "my résults ü"
    made.mkdir()
    return made


def made(path: Path, content: bytes = b"old") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


@contextmanager
def held(path: Path, access: int, share: int = 0) -> Iterator[None]:
    """Keep a file open without sharing it, as a C program can."""
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.CreateFileW.restype = ctypes.c_void_p
    kernel.CreateFileW.argtypes = [
        ctypes.c_wchar_p,
        *[ctypes.c_uint32] * 2,
        ctypes.c_void_p,
        *[ctypes.c_uint32] * 2,
        ctypes.c_void_p,
    ]
    handle = kernel.CreateFileW(str(path), access, share, None, _OPEN_EXISTING, 0, None)
    assert handle != ctypes.c_void_p(-1).value, ctypes.get_last_error()
    try:
        yield
    finally:
        kernel.CloseHandle(ctypes.c_void_p(handle))


def arrow_copy(source: Path, destination: Path) -> None:
    """Copy as Ray Train does: pyarrow.fs.copy_files of a folder into the checkpoint's."""
    local = fs.LocalFileSystem()
    # pyarrow's own function: ci/wine.py corrects Wine's behaviour there.
    copy_files = getattr(fs.copy_files, "__wrapped__", fs.copy_files)
    copy_files(
        source.parent.as_posix(),
        destination.parent.as_posix(),
        source_filesystem=local,
        destination_filesystem=local,
    )


def assert_sharing_violation(error: OSError) -> None:
    assert type(error) is PermissionError
    assert (error.errno, error.winerror) == (13, SHARING_VIOLATION)
    assert "[WinError 32] Failed copying" in str(error)


def test_an_open_file_cannot_be_removed_or_renamed(folder: Path) -> None:
    """PermissionError [WinError 32], also for the folder around it."""
    path = made(folder / "model.pt")
    with path.open("rb"):
        for attempt in (path.unlink, lambda: path.rename(folder / "other.pt"), lambda: shutil.rmtree(folder)):
            with pytest.raises(PermissionError, match="WinError 32") as caught:
                attempt()
            assert (caught.value.errno, caught.value.winerror) == (13, SHARING_VIOLATION)
    path.unlink()


def test_an_open_file_cannot_be_replaced(folder: Path) -> None:
    """os.replace onto it raises PermissionError [WinError 5]; onto a closed file it works, and os.rename never does."""
    draft, path = made(folder / "draft.pt", b"new"), made(folder / "model.pt")
    with path.open("rb"), pytest.raises(PermissionError, match="WinError 5") as caught:
        draft.replace(path)
    assert caught.value.winerror == ACCESS_DENIED
    with pytest.raises(FileExistsError, match="WinError 183"):
        draft.rename(path)
    draft.replace(path)
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("which", ["source", "destination"])
@pytest.mark.parametrize("access", [_READ, _WRITE], ids=["reading", "writing"])
def test_pyarrow_copy_of_a_file_held_without_sharing(folder: Path, which: str, access: int) -> None:
    """PermissionError with errno 13 and winerror 32, the error of a rank whose peer copies the same file."""
    source, destination = made(folder / "from" / "model.pt", b"new"), made(folder / "to" / "model.pt")
    with (
        held(source if which == "source" else destination, access),
        pytest.raises(OSError, match="WinError 32") as caught,
    ):
        arrow_copy(source, destination)
    assert_sharing_violation(caught.value)
    arrow_copy(source, destination)
    assert destination.read_bytes() == b"new"


def test_pyarrow_copy_onto_a_file_that_others_only_may_read(folder: Path) -> None:
    """As if a virus scanner or a viewer has it open."""
    source, destination = made(folder / "from" / "model.pt", b"new"), made(folder / "to" / "model.pt")
    with held(destination, _READ, share=1), pytest.raises(OSError, match="WinError 32") as caught:
        arrow_copy(source, destination)
    assert_sharing_violation(caught.value)


@pytest.mark.skipif(under_wine(), reason="Wine: copies a file that is open for writing")
def test_pyarrow_copy_of_a_file_that_is_open_for_writing(folder: Path) -> None:
    """A checkpoint file that the train function has not closed."""
    source, destination = made(folder / "from" / "model.pt", b"new"), made(folder / "to" / "model.pt")
    with source.open("r+b"), pytest.raises(OSError, match="WinError 32") as caught:
        arrow_copy(source, destination)
    assert_sharing_violation(caught.value)


@pytest.mark.skipif(under_wine(), reason="Wine: two copies write one destination at once, in silence")
def test_two_copies_onto_one_file(folder: Path) -> None:
    """While CopyFileExW runs, a second copy onto the same file is refused: two ranks with one file name."""
    source, destination = made(folder / "from" / "model.pt", bytes(1 << 20)), folder / "to" / "model.pt"
    destination.parent.mkdir()
    errors = second_copy_inside_a_first(source, destination)
    assert errors
    for error in errors:
        assert error is not None
        assert_sharing_violation(error)


def second_copy_inside_a_first(source: Path, destination: Path) -> list[OSError | None]:
    errors: list[OSError | None] = []
    large = ctypes.c_longlong
    prototype = ctypes.WINFUNCTYPE(ctypes.c_uint32, *[large] * 4, *[ctypes.c_uint32] * 2, *[ctypes.c_void_p] * 3)

    def progress(*_: object) -> int:
        if not errors:
            try:
                arrow_copy(source, destination)
                errors.append(None)
            except OSError as error:
                errors.append(error)
        return 0

    callback = prototype(progress)
    copied = ctypes.WinDLL("kernel32", use_last_error=True).CopyFileExW(
        ctypes.c_wchar_p(str(source)), ctypes.c_wchar_p(str(destination)), callback, None, None, 0
    )
    assert copied, ctypes.get_last_error()
    return errors


def test_c_runtime_errors_have_no_winerror(folder: Path) -> None:
    """open() and shutil's copies of a file held without sharing: PermissionError with only errno 13."""
    source, destination = made(folder / "new.pt", b"new"), made(folder / "model.pt")
    with held(destination, _WRITE):
        for attempt in (lambda: destination.open("rb"), lambda: shutil.copyfile(source, destination)):
            with pytest.raises(PermissionError) as caught:
                attempt()
            assert (caught.value.errno, caught.value.winerror) == (13, None)


def test_a_mapped_file_cannot_be_overwritten(folder: Path) -> None:
    """With torch.load(mmap=True) torch.save, open() and pyarrow cannot write it until the tensors are freed."""
    path, source = folder / "to" / "model.pt", made(folder / "from" / "model.pt", b"new")
    path.parent.mkdir()
    torch.save({"weight": torch.arange(100_000)}, path)
    state = torch.load(path, mmap=True)
    with pytest.raises((OSError, RuntimeError)):
        torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(OSError, match="Errno 22"):
        path.open("wb")
    with pytest.raises(OSError, match=f"WinError {USER_MAPPED_FILE}") as caught:
        arrow_copy(source, path)
    assert (caught.value.errno, caught.value.winerror) == (22, USER_MAPPED_FILE)
    assert state["weight"][-1] == 99_999
    del state
    gc.collect()
    torch.save({"weight": torch.zeros(3)}, path)


def test_two_drives_have_no_relative_path() -> None:
    """os.path.relpath and commonpath raise ValueError between drives, so no path of a run is made relative to another."""
    own = Path.cwd().drive
    other = "C:" if own.upper() != "C:" else "D:"
    with pytest.raises(ValueError, match="mount"):
        os.path.relpath(f"{other}\\results", f"{own}\\script")
    with pytest.raises(ValueError, match="same drive"):
        os.path.commonpath([f"{other}\\results", f"{own}\\script"])
