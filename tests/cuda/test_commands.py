"""The commands as a user runs them on a machine with emulated GPUs: exit codes, and what they say of devices, sharing and backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from tests.cuda.emulated import needs_rig
from tests.processes import python_path

pytestmark = [needs_rig, pytest.mark.timeout(400)]

full = pytest.mark.full()
_GPU = "GPU-a0a1a2a3 Emulated CUDA Device"
_HALVES = ("--num-workers", "2", "--gpus-per-worker", "0.5")
_CLUSTER = """
import sys, ray
ray.init("local", num_cpus=8, num_gpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


def machine(state, num_devices=1, **env):
    """Variables of an emulated machine of its own."""
    shape = {"CUDA_RIG_STATE": str(state), "CUDA_RIG_DEVICES": str(num_devices), "CUDA_RIG_NCCL": "2.30.7"}
    return {**os.environ, "PYTHONPATH": python_path(), "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", **shape, **env}


def command(*arguments, env, program=("-m", "ray_fracbackend")):
    """One command, ended."""
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
    env = machine(tmp_path_factory.mktemp("machine"), 2, RAY_AUTH_MODE="disabled")
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


def test_doctor(tmp_path):
    """A device, its compute mode, what NCCL takes and what can be shared; nothing to fix."""
    found = lines_of(command("doctor", "--json", env=machine(tmp_path)))
    ((level, driver),) = found["driver"]
    assert level == "ok"
    assert re.fullmatch(rf"NVIDIA [\d.]+ for CUDA {torch.version.cuda}: 1 x Emulated CUDA Device", driver)
    assert found["cuda:0"] == [("ok", f"{_GPU}, 8.0 GiB, compute mode default: several workers may share it")]
    nccl = "2.30.7 is loaded; it takes shared devices with on_shared_device='nccl'"
    assert found["NCCL"] == [("ok", nccl)]
    assert ("ok", "ranks on one device can share its memory, as far as one process can check") in found["ipc"]
    assert {level for lines in found.values() for level, _ in lines} == {"ok"}


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.8"),
    reason="torch 2.7 itself cannot start CUDA there: it asks CUDA for all GPUs that NVML counts",
)
def test_doctor_on_gpus_in_mig_mode(tmp_path):
    """Of two GPUs in MIG mode CUDA has one slice, which torch counts as two devices until CUDA has started."""
    found = lines_of(command("doctor", "--json", env=machine(tmp_path, 2, CUDA_RIG_MIG="2")))
    (device,) = [name for name in found if name.startswith("cuda:")]
    assert device == "cuda:0"
    assert found[device][0][0] == "ok"
    assert "MIG slice of GPU-a0a1a2a3" in found[device][0][1]
    assert "CUDA devices" not in found


@full
@pytest.mark.parametrize(
    ("fault", "name", "level", "text", "code"),
    [
        ("exclusive", "cuda:0", "warning", "compute mode exclusive_process: workers with a fraction of it fail", 0),
        ("no_ipc", "ipc", "ok", "as far as one process can check", 0),
        ("no_device", "CUDA devices", "ok", "none (", 0),
        ("old_driver", "CUDA devices", "problem", "the NVIDIA driver of the node is too old", 1),
    ],
)
def test_doctor_with_a_fault(tmp_path, fault, name, level, text, code):
    """The line of the fault, its level, and the exit code."""
    found = lines_of(command("doctor", "--json", env=machine(tmp_path, CUDA_RIG_FAULT=fault)), code)
    assert any(each == level and text.lower() in said.lower() for each, said in found[name]), found


def test_doctor_of_a_cluster(cluster):
    """Ray's num_gpus are the devices that CUDA has."""
    address, env = cluster
    found = lines_of(command("doctor", "--json", "--address", address, env=env))
    assert [name for name in found if name.startswith("cuda:")] == ["cuda:0", "cuda:1"]
    assert found["Ray's GPUs"][0][0] == "ok"
    assert {level for lines in found.values() for level, _ in lines} == {"ok"}


def test_plan(cluster):
    """Who shares which device, the backend and why; what it costs is a warning with what to do."""
    address, env = cluster
    done = command("plan", *_HALVES, "--address", address, env=env)
    assert done.returncode == 0, done.stderr
    table, _, rest = done.stdout.partition("\n\n")
    rows = [re.split(r"\s{2,}", line) for line in table.splitlines()[2:]]
    assert [(row[0], row[3], row[4], row[5], row[6]) for row in rows] == [
        ("0", "0.5", _GPU, "1", "2.30.7"),
        ("1", "0.5", _GPU, "0", "2.30.7"),
    ]
    reason = "using gloo (NCCL 2.30.7 refuses shared devices by default) [2 workers, "
    assert f"ranks 0,1 share {_GPU.replace(' ', ' (', 1)}) on node " in rest
    assert reason in rest
    assert "not verified]" in rest
    assert "warning: 2 of 2 ranks share a GPU" in rest


def test_plan_of_devices_of_their_own(cluster):
    """NCCL, no sharing, no warning."""
    address, env = cluster
    done = command("plan", "--num-workers", 2, "--gpus-per-worker", 1, "--address", address, env=env)
    assert done.returncode == 0, done.stderr
    assert "using nccl" in done.stdout
    assert "share" not in done.stdout.partition("\n\n")[2]
    assert "warning" not in done.stdout


TESTS = {
    "gloo": [*_HALVES, "--on-shared-device", "gloo"],
    "staged": [*_HALVES, "--on-shared-device", "staged"],
    "ipc": [*_HALVES, "--on-shared-device", "ipc"],
    "nccl": [*_HALVES, "--on-shared-device", "nccl"],
    "own devices": ["--num-workers", 2, "--gpus-per-worker", 1],
}


@pytest.mark.parametrize(
    "case", ["ipc", "nccl", *(pytest.param(case, marks=full) for case in ("gloo", "staged", "own devices"))]
)
def test_group_test(cluster, case):
    """A real group on the devices, verified, that trains to the weights of one process."""
    address, env = cluster
    done = command("test", *TESTS[case], "--address", address, "--json", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    backend = {"staged": "cpu:gloo,cuda:staged", "own devices": "nccl"}.get(case, case)
    assert (found["ok"], found["report"]["backend"]) == (True, backend)
    assert [group["ranks"] for group in found["report"]["plan"]["share_groups"]] == ([] if "own" in case else [[0, 1]])
    assert max(step["difference"] for step in found["steps"]) < 1e-9


def test_group_test_that_is_refused(cluster):
    """Exit code 1 and the ranks that share, where sharing is to be an error."""
    address, env = cluster
    done = command("test", *_HALVES, "--on-shared-device", "error", "--address", address, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ranks 0,1 share GPU-a0a1a2a3" in done.stderr


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
    assert "using gloo (NCCL 2.28.9 refuses shared devices)" in done.stdout + done.stderr


def test_demo(tmp_path):
    """It trains on the device, and stock's ends with NCCL's refusal."""
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn (extra demo)")
    done = command("demo", "--epochs", 2, env=machine(tmp_path))
    assert done.returncode == 0, done.stderr
    assert _GPU in done.stdout
    assert "using gloo" in done.stdout


@full
def test_stock_demo(tmp_path):
    """Ray's own config ends with NCCL's refusal in the traceback, as of any script, and exit code 1."""
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn (extra demo)")
    done = command("demo", "--stock", "--epochs", 1, env=machine(tmp_path, CUDA_RIG_NCCL="2.28.9"))
    assert done.returncode == 1
    assert "Duplicate GPU detected" in done.stderr
