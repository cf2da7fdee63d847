"""The version of the loaded NCCL, from names and numbers like those of a real one."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from ray_fracbackend.worker import nccl_library


@pytest.mark.parametrize(("number", "version"), [(21805, (2, 18, 5)), (22809, (2, 28, 9)), (23007, (2, 30, 7))])
def test_version_numbers(number, version):
    """As in nccl.h."""
    assert nccl_library.decode_version(number) == version


@pytest.mark.linux(reason="asks the dynamic linker of Linux")
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch that has loaded no NCCL: a CPU build")
def test_nccl_inside_torch(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9, "suffix"))
    assert nccl_library.loaded_nccl_version() == (2, 28, 9)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [(b"Duplicate GPU detected", RuntimeError), (b"Cuda failure 2 'out of memory'", torch.cuda.OutOfMemoryError)],
)
def test_the_reason_of_an_nccl_that_does_not_connect(reason, kind, monkeypatch):
    """As torch writes it where NCCL connects later; other errors stay as they are."""
    monkeypatch.setattr(nccl_library, "_function", lambda name: lambda communicator: reason)
    with pytest.raises(kind, match=f"unhandled cuda error\nLast error:\n{reason.decode()}"), nccl_library.reason_told():
        raise RuntimeError("Failed to initialize NCCL communicator: unhandled cuda error")
    with pytest.raises(RuntimeError, match=r"^Connection refused$"), nccl_library.reason_told():
        raise RuntimeError("Connection refused")


# Load another package's copy, if given, and print the version that is found with torch's library in this folder.
FIND = """
import ctypes, sys, torch, torch.distributed as dist
from ray_fracbackend.worker import nccl_library
torch.__file__ = sys.argv[1]
dist.is_nccl_available = lambda: True
for path in sys.argv[2:]:
    ctypes.CDLL(path)
print(nccl_library.loaded_nccl_version())
"""


def compiled(path, source, *options):
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-o", str(path), "-x", "c", "-", "-x", "none", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return str(path)


def nccl(folder, number):
    """Compile a library that reports this version of NCCL."""
    source = f"int ncclGetVersion(int *number) {{ *number = {number}; return 0; }}"
    return compiled(folder / "libnccl.so.2", source, "-Wl,-soname,libnccl.so.2")


@pytest.mark.full
@pytest.mark.linux(reason="NCCL's library is found through the dynamic linker of Linux")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="needs a torch that has loaded no NCCL of its own: a CPU build"
)
def test_the_library_that_torch_calls(tmp_path):
    """Another package's copy that was loaded before is ignored; a preloaded one precedes torch's own, as for torch."""
    own = nccl(tmp_path / "own", 22809)
    calls = "int ncclGetVersion(int *); int calls(int *number) { return ncclGetVersion(number); }"
    rpath = ["-Wl,--disable-new-dtags", f"-Wl,-rpath,{tmp_path}/own"]
    compiled(tmp_path / "torch" / "lib" / "libtorch_cuda.so", calls, own, *rpath)
    source = "int ncclGetVersion(int *number) { *number = 21805; return 0; }"
    other = compiled(tmp_path / "other" / "libnccl.so", source)
    newer = nccl(tmp_path / "newer", 23007)
    command = [sys.executable, "-c", FIND, str(tmp_path / "torch" / "__init__.py"), other]
    for preload, found in (("", (2, 28, 9)), (newer, (2, 30, 7))):
        env = {**os.environ, "LD_PRELOAD": preload}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(found)
