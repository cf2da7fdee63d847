"""The doctor's lines about facts, its report, and its child process with real packages that fail, crash and hang."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from unittest import mock

import pytest
from packaging.requirements import Requirement

from ray_fracbackend.cli.doctor.checks import check_cluster, check_machine, environment_variables
from ray_fracbackend.cli.doctor.facts import STAGES, collect_facts, nvidia_driver
from ray_fracbackend.cli.doctor.report import Check, Node, report, verdict
from ray_fracbackend.worker import probe
from tests.processes import processes_with, python_path, wait_until, with_signals
from tests.unit.builders import gpu, mig, worker

_TWO = {"num_nodes": 2, "num_gpus": 0.0}


def machine(device=None, env=None, **facts):
    """Return the facts of a healthy machine, except for the given ones; those of WorkerInfo go there."""
    own = {name: facts.pop(name) for name in list(facts) if hasattr(worker(0), name) and name != "node_ip"}
    return {
        "ray_fracbackend": "0.1.0",
        "Python": "3.11.7",
        "platform": own.get("platform", "linux"),
        "ray": "2.60.0",
        "torch": "2.13.0",
        "variables": env or {},
        "gloo_interface": "eth0",
        "node_ip": "10.0.0.1",
        "hostname": "host1",
        "host_addresses": ["10.0.0.1"],
        "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
        "shm_bytes": (8 << 30, 8 << 30),
        "GPUs": "NVIDIA H200",
        "num_driver_gpus": 1 if device else 0,
        "worker": asdict(worker(0, device, **own)),
        **facts,
    }


def failed(stage, text):
    """Return the facts of a machine where a stage failed, without those of the later stages."""
    facts = machine(failed_stage=stage, failure=text)
    return {name: value for name, value in facts.items() if name not in ("torch", "worker", "ray", "gloo_interface")}


# Facts, the line about them, and its level.
CASES = {
    "silent name server": (machine(name_server_silent=True), "name server", "warning"),
    "old ray": (machine(ray="2.39.0"), "versions", "problem"),
    "old torch": (machine(torch="2.3.1+cpu"), "versions", "problem"),
    "libuv": (machine(platform="win32", env={"USE_LIBUV": "1"}), "versions", "warning"),
    "libuv on Linux": (machine(env={"USE_LIBUV": "1"}), "versions", "ok"),
    "torch fails": (failed("torch", "failed: OSError: libcudart.so.12"), "torch", "problem"),
    "torch without its runtime": (
        failed("torch", "failed: OSError: [WinError 126] nicht gefunden"),
        "torch",
        "problem",
    ),
    "letters in Windows paths": (machine(unusable_paths=["C:\\Jürgen"]), "paths", "problem"),
    "OneDrive": (machine(unusable_paths=[], in_onedrive=True), "paths", "warning"),
    "short paths": (machine(unusable_paths=[], in_onedrive=False, has_long_paths=False), "paths", "warning"),
    "Windows paths": (machine(unusable_paths=[], in_onedrive=False, has_long_paths=True), "paths", "ok"),
    "ray crashes": (failed("ray", "ended the process: SIGSEGV"), "ray", "problem"),
    "the driver hangs": (failed("driver", "did not end within 60 s"), "driver", "problem"),
    "no Gloo": (failed("Gloo", "failed: RendezvousError: no transport"), "Gloo", "problem"),
    "no answer": ({"failed_stage": "node", "failure": "no answer within 60 s"}, "node", "problem"),
    "no GPU": (machine(cuda_missing="a CPU-only build"), "CUDA devices", "ok"),
    "GPU that torch cannot use": (machine(num_driver_gpus=2, cuda_missing="a CPU build"), "CUDA devices", "problem"),
    "hidden GPU": (machine(num_driver_gpus=2, env={"CUDA_VISIBLE_DEVICES": ""}), "CUDA devices", "warning"),
    "wrong list of GPUs": (machine(num_driver_gpus=2, env={"CUDA_VISIBLE_DEVICES": "9"}), "CUDA devices", "problem"),
    "num_gpus without a GPU": (machine(num_gpus=2), "Ray's GPUs", "problem"),
    "num_gpus too high": (machine(gpu(), num_gpus=2), "Ray's GPUs", "problem"),
    "num_gpus as present": (machine(gpu(), num_gpus=1), "Ray's GPUs", "ok"),
    "prohibited": (machine(gpu(compute_mode="prohibited")), "cuda:0", "problem"),
    "exclusive": (machine(gpu(compute_mode="exclusive_process")), "cuda:0", "warning"),
    "exclusive with MPS": (machine(gpu(compute_mode="exclusive_process"), mps_reachable=True), "cuda:0", "ok"),
    "MIG with an old NCCL": (machine(mig("s1")), "cuda:0", "warning"),
    "MIG with a new NCCL": (machine(mig("s1"), nccl_version=(2, 30, 7)), "cuda:0", "ok"),
    "NCCL missing": (machine(gpu(), nccl_available=False, nccl_version=None), "NCCL", "warning"),
    "NCCL unknown": (machine(gpu(), nccl_version=None), "NCCL", "warning"),
    "NCCL not needed": (machine(), "NCCL", "ok"),
    "foreign name": (machine(host_addresses=["203.0.113.5"]), "host name", "problem"),
    "no name": (machine(host_addresses=[], host_missing="unknown"), "host name", "warning"),
    "no name on Windows": (machine(host_addresses=[], host_missing="x", platform="win32"), "host name", "problem"),
    "loopback name": (machine(host_addresses=["127.0.1.1"]), "host name", "ok"),
    "loopback name of a node": (machine(host_addresses=["127.0.1.1"], **_TWO), "host name", "warning"),
    "no interface": (machine(interfaces={}), "interfaces", "problem"),
    "unknown interface": (machine(env={"GLOO_SOCKET_IFNAME": "^lo,docker"}), "interfaces", "problem"),
    "known interface": (machine(env={"GLOO_SOCKET_IFNAME": "lo,eth0"}), "interfaces", "ok"),
    "unknown to NCCL": (machine(env={"NCCL_SOCKET_IFNAME": "foo"}), "interfaces", "warning"),
    "known to NCCL": (machine(env={"NCCL_SOCKET_IFNAME": "^docker"}), "interfaces", "ok"),
    "loopback node": (machine(node_ip="127.0.0.1", **_TWO), "interfaces", "problem"),
    "translated address": (machine(node_ip="192.0.2.7", **_TWO), "interfaces", "warning"),
    "tiny shm": (machine(shm_bytes=(64 << 20, 63 << 20)), "/dev/shm", "problem"),
    "full shm": (machine(shm_bytes=(8 << 30, 1 << 20)), "/dev/shm", "problem"),
    "small shm": (machine(shm_bytes=(512 << 20, 512 << 20)), "/dev/shm", "warning"),
}


@pytest.mark.parametrize(("facts", "name", "level"), CASES.values(), ids=CASES)
def test_line(facts, name, level):
    """Each fault leads to one line with a level, and the other lines are ok."""
    checks = check_machine(facts)
    assert [check.level for check in checks if check.name == name] == [level], checks
    assert {check.level for check in checks if check.name != name} <= {"ok"}, checks
    assert not [check for check in checks if check.level == "ok" and check.fix]
    assert ("Visual C++" in str(checks)) == ("WinError 126" in str(facts))


@pytest.mark.parametrize("device", [None, gpu()], ids=["cpu", "gpu"])
def test_healthy_machine(device):
    """All lines are ok; those of a GPU have the backend of workers that share it."""
    checks = check_machine(machine(device))
    assert {check.level for check in checks} == {"ok"}
    assert [check.text.rpartition(" ")[2] for check in checks if check.name == "cuda:0"] == (["gloo"] if device else [])
    assert "/dev/shm" not in {check.name for check in check_machine(machine(shm_bytes=None))}


def test_old_versions():
    """The fix is a command that pip accepts, with one requirement per package."""
    (check,) = (check for check in check_machine(machine(ray="2.39.0", torch="2.3.1")) if check.name == "versions")
    assert [Requirement(part).name for part in check.fix.split("'")[1::2]] == ["ray", "torch"]


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"platform": "win32"}, True),
        ({"Python": "3.12.1"}, True),
        ({"torch": "2.14.0"}, True),
        ({"Python": "3.11.9"}, False),
    ],
)
def test_nodes_that_differ(other, differs):
    """Other versions are a problem that names a node of each; Ray treats 3.11.7 and 3.11.9 as the same Python."""
    found = check_cluster([machine(), machine(), machine(node_ip="10.0.0.2", **other), failed("torch", "")])
    assert [check.level for check in found] == ["problem"] * differs
    assert all("10.0.0.1" in check.text and "10.0.0.2" in check.text for check in found)


def test_equal_nodes_are_one_block():
    """Addresses, host names, GPUs and free memory make no difference; a node that differs has its own lines."""
    nodes = []
    for index, facts in enumerate(({}, {}, {"shm_bytes": (512 << 20, 500 << 20)}), 1):
        own = {"node_ip": f"10.0.0.{index}", "hostname": f"host{index}", "host_addresses": [f"10.0.0.{index}"]}
        own |= {"interfaces": {"eth0": [f"10.0.0.{index}"]}, "shm_bytes": (8 << 30, index << 30), **facts}
        found = machine(gpu(f"{index}"), **own)
        nodes.append(Node(f"node {index}", check_machine(found), environment_variables(found)))
    text = report(nodes)
    assert text.startswith("2 equal nodes, with the values of the first: node 1, node 2\n")
    assert "\nnode 3\n" in text
    assert (text.count(" cuda:0 "), text.count(" 10.0.0.1)"), text.count(" 10.0.0.2)")) == (2, 2, 0)
    assert text.endswith("\n\n0 problems, 1 warning (/dev/shm)")


def test_report():
    """A line, its fix below it, the block for an issue, and the verdict."""
    checks = (Check("NCCL", "ok", "2.28.9"), Check("/dev/shm", "warning", "little", "more", "1 GiB"))
    text = report([Node("here", checks, environment_variables(machine(gpu(), env={"NCCL_DEBUG": "INFO"})))])
    assert f"  ok       NCCL          2.28.9\n  warning  /dev/shm      little (1 GiB)\n{'':25}fix: more\n" in text
    assert "\n\nPaste this into an issue:\n\n    Python: 3.11.7\n" in text
    assert "\n    GPUs: NVIDIA H200\n    NCCL_DEBUG: INFO\n" in text
    assert text.endswith("\n\n0 problems, 1 warning (/dev/shm)")
    assert verdict([Node("a", (Check("x", "problem", "y"),))] * 2) == "1 problem (x), 0 warnings"


def test_no_secrets(monkeypatch):
    """Only variables of the list are shown, and none that may contain a secret; the same holds for a start's report."""
    for name in ("NCCL_DEBUG", "RAY_TRAIN_X", "RAY_AUTH_MODE", "USE_LIBUV"):
        monkeypatch.setenv(name, "shown")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "WANDB_API_KEY", "RAY_TRAIN_TOKEN", "NCCL_X_KEY", "HOME"):
        monkeypatch.setenv(name, "hidden")
    found = STAGES["system"]("")["variables"]
    assert {"NCCL_DEBUG", "RAY_TRAIN_X", "RAY_AUTH_MODE", "USE_LIBUV"} <= set(found)
    assert "hidden" not in found.values()
    given = dict.fromkeys(("NCCL_DEBUG", "NCCL_X_KEY", "NCCL_FOO_TOKEN", "HOME"), "value")
    assert set(probe.collect_info([], rank=0, node_id="", node_ip="", env=given).env) == {"NCCL_DEBUG"}


@pytest.mark.linux(reason="asks getent")
def test_silent_name_server(tmp_path, monkeypatch):
    """A lookup that takes longer than a second is a fact."""
    (tmp_path / "getent").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "getent").chmod(0o755)
    assert STAGES["network"]("127.0.0.1")["name_server_silent"] is False
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert STAGES["network"]("127.0.0.1")["name_server_silent"] is True


def test_gpus_of_the_driver(monkeypatch):
    """NVML's GPUs, also those of which it returns no name; nothing without NVML."""
    nvml = mock.Mock(NVMLError=ValueError)
    nvml.nvmlDeviceGetCount.return_value, nvml.nvmlSystemGetDriverVersion.return_value = 2, b"570.1"
    nvml.nvmlDeviceGetName.side_effect = ["NVIDIA H200", ValueError]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = {"NVIDIA driver": "570.1", "GPUs": "NVIDIA H200, one that does not answer", "num_driver_gpus": 2}
    assert nvidia_driver() == found
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_driver() == {}


def environment(folder, **bodies):
    """Return variables with modules of these bodies before all others."""
    for name, body in {"pynvml": "raise ImportError", **bodies}.items():
        (folder / f"{name}.py").write_text(body, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), python_path()])}


def no_process_is_left(folder):
    """Return whether all processes with the folder on their path end in time."""
    return wait_until(lambda: not processes_with("PYTHONPATH", str(folder)), 10)


_KILLED = "import os, signal; print('cause', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("print('noise'); raise OSError('libcudart.so.12:\\ncannot open')", "failed: OSError: libcudart.so.12: "),
        ("import sys; sys.exit(7)", "failed: SystemExit: 7"),
        ("import os; os._exit(7)", "ended the process: exit code 7"),
        ("import time; time.sleep(600)", "did not end within 5 s"),
        pytest.param(_KILLED, "ended the process: SIGKILL (cause)", marks=pytest.mark.linux(reason="sends signals")),
    ],
    ids=["raises", "sys.exit", "exit code", "hangs", "signal"],
)
def test_torch_that_cannot_be_imported(tmp_path, body, text):
    """One JSON document has the reason and the facts of the earlier stages; nothing is on the terminal, and no process is left."""
    limit = "5" if "sleep(600)" in body else "50"  # a busy machine may need more than 5 s for the stages before
    command = [sys.executable, "-m", "ray_fracbackend", "doctor", "--json", "--timeout-s", limit]
    env = environment(tmp_path, torch=body)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    (node,) = json.loads(done.stdout)["nodes"]
    found = {check["name"]: check for check in node["checks"]}
    assert f"the import of torch {text}" in found["torch"]["text"]
    assert "CUDA devices, ray, Gloo" in found["torch"]["text"]
    assert {"host name", "interfaces"} <= set(found)
    assert no_process_is_left(tmp_path)


def test_a_report_in_a_code_page_without_its_letters(tmp_path):
    """As a pipe on Windows: the letters are escaped."""
    env = environment(tmp_path, torch="raise OSError('Подключение')") | {"PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, "-m", "ray_fracbackend", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"")
    assert rb"OSError: \u041f\u043e" in done.stdout


def test_the_current_folder_is_not_on_the_path(tmp_path, monkeypatch):
    """The child imports what this process would, so a file of somebody else in a shared folder does not run."""
    (tmp_path / "ctypes.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert "failed_stage" not in collect_facts(100)


_ENDS = [
    *(pytest.param(each, marks=pytest.mark.linux(reason="sends signals")) for each in (signal.SIGINT, signal.SIGTERM)),
    9,  # SIGKILL, a name that Windows lacks; there as Task Manager does it
]


@pytest.mark.parametrize("ending", _ENDS)
def test_no_process_is_left(tmp_path, ending):
    """The child and its own processes end with the command, however it ends."""
    waits = "time.sleep(600)" if sys.platform == "win32" else "subprocess.run(['sleep', '600'])"
    body = f"import subprocess, time\ndef nvmlInit(): open('ready', 'w').close(); {waits}"
    command, env = with_signals(sys.executable, "-m", "ray_fracbackend", "doctor"), environment(tmp_path, pynvml=body)
    with subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        assert wait_until((tmp_path / "ready").exists, 60)
        process.kill() if ending == 9 else process.send_signal(ending)
        process.wait(20)
    assert no_process_is_left(tmp_path)
