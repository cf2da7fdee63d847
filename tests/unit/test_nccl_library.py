"""Which NCCL is loaded, from the names and numbers that a real one would give."""

import pytest

from ray_fracbackend.worker import nccl_library


@pytest.mark.parametrize(
    ("number", "version"), [(21805, (2, 18, 5)), (22809, (2, 28, 9)), (23007, (2, 30, 7)), (2708, (2, 7, 8))]
)
def test_version_numbers(number, version):
    """Both of NCCL's number schemes."""
    assert nccl_library.decode_version(number) == version


def test_library_is_found_in_this_processs_maps(monkeypatch):
    """A preloaded library comes before torch's own."""
    paths = ["/site/nvidia/nccl/lib/libnccl.so.2", "/opt/libnccl.so.2", "/lib/libc.so"]
    maps = "".join(f"7f0 r-xp 0 0 1 {path}\n" for path in paths)
    monkeypatch.setattr(nccl_library.Path, "read_text", lambda self: maps)
    monkeypatch.setenv("LD_PRELOAD", "/opt/libnccl.so.2")
    assert nccl_library._loaded_paths() == ["/opt/libnccl.so.2", "/site/nvidia/nccl/lib/libnccl.so.2"]
