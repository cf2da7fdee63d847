"""The bench command: real measurements of small sizes, as a user runs it."""

import json
import subprocess
import sys

import pytest
import torch

from ray_fracbackend.cli import bench, main
from ray_fracbackend.decide.nccl import multi_rank_env
from ray_fracbackend.ipc import host_memory_support

pytestmark = pytest.mark.skipif(host_memory_support() is not None, reason=f"no ipc here: {host_memory_support()}")


def run(*arguments):
    command = [sys.executable, "-m", "ray_fracbackend", "bench", "--ranks", "2", "--sizes", "4096", "--rounds", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.full
def test_json_and_plot(tmp_path):
    """--json is one document with both sides of every case, and --plot draws it."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra bench)")
    done = run("--json", "--plot", str(tmp_path / "bench.png"))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {"ipc", "gloo"} <= {row["backend"] for row in rows}
    assert {row["operation"] for row in rows} == {"all_reduce", "ddp_step"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_operation(capsys):
    """A wrong operation is exit code 2 with the names that there are."""
    assert main(["bench", "--operations", "all_reduze"]) == 2
    assert "must be one of all_reduce" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where torch sees no CUDA device")
def test_no_device_to_measure_on(capsys):
    """Without CUDA, --device cuda says where to look."""
    assert main(["bench", "--ranks", "2", "--device", "cuda"]) == 1
    assert "no CUDA device here; ray-fracbackend doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "devices", "version", "expected"),
    [
        (2, 2, (2, 21, 5), {}),
        (3, 2, (2, 29, 7), None),
        (3, 2, None, None),
        (3, 2, (2, 30, 7), multi_rank_env(2)),
        (8, 1, (2, 30, 0), multi_rank_env(8)),
    ],
)
def test_nccl_is_measured_where_it_takes_the_ranks(monkeypatch, ranks, devices, version, expected):
    """A device each, or a version that lets ranks share one and its flags for the fullest device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(bench, "loaded_nccl_version", lambda: version)
    assert bench._nccl_env(ranks) == expected
