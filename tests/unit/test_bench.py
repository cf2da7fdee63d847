"""The bench command: real measurements of small sizes, as a user runs it."""

import json
import subprocess
import sys

import pytest

from ray_fracbackend.ipc import host_memory_support

pytestmark = pytest.mark.skipif(host_memory_support() is not None, reason=f"no ipc here: {host_memory_support()}")


def run(*arguments):
    command = [sys.executable, "-m", "ray_fracbackend", "bench", "--ranks", "2", "--sizes", "4096", "--rounds", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, check=False)


def test_json_and_plot(tmp_path):
    """--json is one document with both sides of every case, and --plot draws it."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra bench)")
    done = run("--json", "--plot", str(tmp_path / "bench.png"))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {"ipc", "gloo"} <= {row["backend"] for row in rows}
    assert {row["operation"] for row in rows} == {"all_reduce", "ddp_step"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_operation():
    """A wrong operation is exit code 2 with the names that there are."""
    done = run("--operations", "all_reduze")
    assert done.returncode == 2
    assert "must be one of all_reduce" in done.stderr
