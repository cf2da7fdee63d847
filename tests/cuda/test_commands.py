"""The commands as a user runs them on a machine with emulated GPUs: exit codes, and what they say of devices, sharing and backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from tests.processes import python_path

pytestmark = pytest.mark.timeout(400)

full = pytest.mark.full()
_CLUSTER = """
import sys, ray
ray.init("local", num_cpus=8, num_gpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


def machine(state, **env):
    """Variables of an emulated machine of its own."""
    shape = {"CUDA_RIG_STATE": str(state), "CUDA_RIG_DEVICES": "1", "CUDA_RIG_NCCL": "2.30.7"}
    return {**os.environ, "PYTHONPATH": python_path(), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", **shape, **env}


def command(*arguments, env, program=("-m", "ray_fracbackend")):
    line = [sys.executable, *program, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=280, check=False, env=env)


def lines_of(done, code=0):
    """Lines of the doctor's answer by name, after the check of its exit code."""
    assert done.returncode == code, done.stdout + done.stderr
    (node,) = json.loads(done.stdout)["nodes"]
    found = {}
    for check in node["checks"]:
        found.setdefault(check["name"], []).append((check["level"], check["text"]))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Address and variables of a Ray that runs on a machine of two devices."""
    env = machine(tmp_path_factory.mktemp("machine"), CUDA_RIG_DEVICES="2", RAY_AUTH_MODE="disabled")
    with tempfile.TemporaryDirectory(prefix="rf", ignore_cleanup_errors=True) as folder:  # sockets have short paths
        process = subprocess.Popen(
            [sys.executable, "-c", _CLUSTER, "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**env, "RAY_TMPDIR": folder},
        )
        try:
            address = process.stdout.readline().strip()
            assert address, "Ray did not start"
            yield address, env
        finally:
            process.communicate(timeout=60)


MIG = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.14"),
    reason="torch 2.7.1 and 2.11.0 themselves cannot start CUDA there: they ask CUDA for all GPUs that NVML counts; 2.14.1 can",
)


_DEVICE = "Emulated CUDA Device, 8.0 GiB, compute mode default"
WHOLE = {"cuda:0": ("ok", f"{_DEVICE}: workers that share it use gloo"), "NCCL": ("ok", "2.30.7 is loaded")}
FAULTS = {
    "exclusive": ("cuda:0", "warning", "compute mode exclusive_process: workers cannot share it"),
    "no_device": ("CUDA devices", "ok", "none ("),
    "old_driver": ("CUDA devices", "problem", "the NVIDIA driver of the node is too old"),
}
# Of two GPUs in MIG mode CUDA has one slice, which torch counts as two devices until CUDA has started.
TWO_IN_MIG_MODE = {"CUDA_RIG_MIG": "2", "CUDA_RIG_DEVICES": "2"}


@pytest.mark.parametrize(
    ("env", "lines"),
    [
        ({}, WHOLE),
        pytest.param(TWO_IN_MIG_MODE, {"cuda:0": ("ok", "")}, marks=MIG),
        *(pytest.param({"CUDA_RIG_FAULT": fault}, {line[0]: line[1:]}, marks=full) for fault, line in FAULTS.items()),
    ],
)
def test_doctor(tmp_path, env, lines):
    """Some lines with their levels, and the exit code; nothing else is wrong, and no other device is there."""
    levels = {level for level, _ in lines.values()}
    found = lines_of(command("doctor", "--json", env=machine(tmp_path, **env)), int("problem" in levels))
    for name, (level, text) in lines.items():
        assert any(each == level and text.lower() in said.lower() for each, said in found[name]), found
    assert {level for said in found.values() for level, _ in said} <= {"ok", *levels}
    assert "cuda:1" not in found


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_group_test(cluster, backend):
    """A real group on the devices, verified, that trains to the weights of one process."""
    address, env = cluster
    halves = ("--num-workers", "2", "--gpus-per-worker", "0.5", "--on-shared-device", backend)
    done = command("test", *halves, "--address", address, "--json", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["report"]["backend"]) == (True, backend)
    assert [group["ranks"] for group in found["report"]["plan"]["share_groups"]] == [[0, 1]]
    assert max(step["difference"] for step in found["steps"]) < 1e-9


def test_run(tmp_path):
    """A script that NCCL refuses under python trains under run, unedited."""
    script = Path(__file__).parents[1] / "ray" / "stock_script.py"
    env = machine(tmp_path, CUDA_RIG_NCCL="2.28.9")
    plain = command(script, "none", tmp_path, env=env, program=())
    assert plain.returncode == 1
    assert "Duplicate GPU detected" in plain.stderr
    done = command("run", script, "none", tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("none-rank*.json"))]
    assert [(rank["started_by_us"], rank["backend"]) for rank in ranks] == [(True, "gloo")] * 2
    assert "using gloo (NCCL 2.28.9 " in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "nccl", "code", "said"),
    [([], "2.30.7", 0, "using gloo"), pytest.param(["--stock"], "2.28.9", 1, "Duplicate GPU detected", marks=full)],
)
def test_demo(tmp_path, arguments, nccl, code, said):
    """It trains on the device, and stock's ends with NCCL's refusal."""
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn (extra demo)")
    done = command("demo", *arguments, "--epochs", 2, env=machine(tmp_path, CUDA_RIG_NCCL=nccl))
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
