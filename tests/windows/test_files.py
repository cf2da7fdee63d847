"""Files that are held or being copied: Windows' refusals, with the errors of pyarrow."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pyarrow import fs

from ray_fracbackend.checkpoints.turns import copy_in_turn
from tests.processes import under_wine

pytestmark = pytest.mark.windows(reason="Windows' sharing of files")

SHARING_VIOLATION = 32
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


@pytest.mark.parametrize(
    ("which", "access", "share"),
    [
        *((which, access, 0) for which in ("source", "destination") for access in (_READ, _WRITE)),
        ("destination", _READ, 1),
    ],
)
def test_pyarrow_copy_of_a_held_file(folder: Path, which: str, access: int, share: int) -> None:
    """PermissionError with errno 13 and winerror 32, the error of a rank whose peer copies the same file.

    Also onto a file that others may only read, as if a virus scanner or a viewer has it open.
    """
    source, destination = made(folder / "from" / "model.pt", b"new"), made(folder / "to" / "model.pt")
    with (
        held(source if which == "source" else destination, access, share),
        pytest.raises(OSError, match="WinError 32") as caught,
    ):
        arrow_copy(source, destination)
    assert_sharing_violation(caught.value)
    arrow_copy(source, destination)
    assert destination.read_bytes() == b"new"


def test_a_copy_onto_a_file_that_is_held_for_a_second(folder: Path) -> None:
    """As by a virus scanner or OneDrive: the copy of a worker succeeds."""
    source, destination = made(folder / "from" / "model.pt", b"new"), made(folder / "to" / "model.pt")
    with ExitStack() as stack:
        stack.enter_context(held(destination, _READ, 1))
        threading.Timer(1.0, stack.close).start()
        copy_in_turn(destination.parent.as_posix(), lambda: arrow_copy(source, destination))
    assert destination.read_bytes() == b"new"


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
