"""The doctor's lines, from reports to levels, and its child process, with real children.

tests/ray/test_doctor.py uses real machines and clusters.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from ray_fracbackend.cli.doctor import collect
from ray_fracbackend.cli.doctor.checks import check_cluster, check_machine, own_values
from ray_fracbackend.cli.doctor.child import STAGES, Found, _variables, shown_variables
from ray_fracbackend.cli.doctor.environment import environment_lines, environment_of
from ray_fracbackend.cli.doctor.report import Check, Diagnosis, Failure, MachineInfo
from ray_fracbackend.decide.worker_info import NetworkInfo
from ray_fracbackend.worker import probe
from tests.processes import processes_with, python_path, wait_until, with_signals
from tests.unit.builders import gpu, mig, worker

_NETWORK = NetworkInfo(interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)})


def machine(device=None, network=_NETWORK, **facts):
    """Return a healthy machine, except for the given attributes; those of WorkerInfo go there."""
    own = {name: facts.pop(name) for name in list(facts) if name in MachineInfo.__dataclass_fields__}
    defaults = {"ray_version": "2.60.0", "torch_version": "2.13.0", "ipc_host_memory_missing": None}
    found = worker(0, device, network=network, **{**defaults, "ipc_device_memory_missing": None, **facts})
    return MachineInfo(
        **{
            "worker": found,
            "package_version": "0.1.0",
            "python_version": "3.11.7",
            "host_addresses": ("10.0.0.1",),
            "shm_total_bytes": 8 << 30,
            "shm_free_bytes": 8 << 30,
            "ray_gpus": 1.0 if device else 0.0,
            "num_node_devices": 1 if device else 0,
            **own,
        }
    )


def line(facts, name, num_nodes=1):
    """Return the most severe line with a name."""
    found = [check for check in check_machine(facts, num_nodes) if check.name == name]
    return max(found, key=lambda check: ("ok", "warning", "problem").index(check.level))


@pytest.mark.parametrize("device", [None, gpu()], ids=["cpu", "gpu"])
def test_healthy_machine(device):
    """All lines are ok, and none has a fix."""
    checks = check_machine(machine(device))
    assert {check.level for check in checks} == {"ok"}
    assert not any(check.fix for check in checks)


CASES = {
    "silent name server": (
        machine(name_server_silent=True),
        "name server",
        "warning",
        "no answer within a second",
        "/etc/resolv.conf",
    ),
    "old ray": (machine(ray_version="2.39.0"), "versions", "problem", "ray 2.39.0", "pip install 'ray[train]>=2.40'"),
    "old torch": (machine(torch_version="2.3.1+cpu"), "versions", "problem", "torch 2.3.1", "torch>=2.4"),
    "cpu-only torch beside a GPU": (
        machine(num_node_devices=2, cuda_missing="torch 2.13.0+cpu is a CPU-only build", ray_gpus=2),
        "CUDA devices",
        "problem",
        "none of the node's 2 GPUs: torch 2.13.0+cpu is a CPU-only build",
        "CUDA build",
    ),
    "devices hidden": (
        machine(num_node_devices=2, cuda_visible_devices="", cuda_missing="CUDA_VISIBLE_DEVICES='' leaves none"),
        "CUDA devices",
        "warning",
        "leaves none",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "more GPUs in Ray than there are": (
        machine(ray_gpus=2.0, cuda_missing="no driver"),
        "Ray's GPUs",
        "problem",
        "num_gpus=2 of the node exceeds the GPUs present (0)",
        "--num-gpus=0",
    ),
    "two in Ray, one there": (
        machine(gpu(), ray_gpus=2.0),
        "Ray's GPUs",
        "problem",
        "num_gpus=2 of the node exceeds the GPUs present (1)",
        "=1",
    ),
    "prohibited": (machine(gpu(compute_mode="prohibited")), "cuda:0", "problem", "no process", "nvidia-smi -c DEFAULT"),
    "exclusive": (
        machine(gpu(compute_mode="exclusive_process")),
        "cuda:0",
        "warning",
        "workers with a fraction of it fail",
        "nvidia-cuda-mps-control",
    ),
    "exclusive with MPS": (
        machine(gpu(compute_mode="exclusive_process"), mps_reachable=True),
        "cuda:0",
        "ok",
        "several workers may share it",
        "",
    ),
    "MIG under an old NCCL": (machine(mig("s1")), "cuda:0", "warning", "MIG slice of GPU-a", "2.30.7"),
    "MIG under a new NCCL": (machine(mig("s1"), nccl_version=(2, 30, 7)), "cuda:0", "ok", "MIG slice of GPU-a", ""),
    "MIG slices are not counted": (machine(mig("s1"), ray_gpus=7.0), "Ray's GPUs", "ok", "MIG slices", ""),
    "NCCL missing": (machine(gpu(), nccl_available=False), "NCCL", "warning", "ranks use gloo", "with NCCL"),
    "NCCL unknown": (machine(gpu(), nccl_version=None), "NCCL", "warning", "cannot be read", "reinstall"),
    "NCCL unknown, and no GPU": (
        machine(nccl_available=True),
        "NCCL",
        "ok",
        "cannot be read, and it is not needed",
        "",
    ),
    "old NCCL": (machine(gpu()), "NCCL", "ok", "2.28.9 is loaded; it refuses shared devices", ""),
    "new NCCL": (machine(gpu(), nccl_version=(2, 30, 3)), "NCCL", "ok", "on_shared_device='nccl'", ""),
    "MPS": (machine(gpu(), mps_reachable=True), "MPS", "ok", "answers", ""),
    "no Gloo transport": (
        machine(network=replace(_NETWORK, gloo_missing="torch 2.9.0 on win32 has no Gloo transport")),
        "Gloo",
        "problem",
        "no Gloo transport",
        "another torch",
    ),
    "no Gloo device": (machine(gloo_device_missing="cannot use eth9"), "Gloo", "problem", "eth9", "GLOO_SOCKET_IFNAME"),
    "foreign name": (
        machine(host_addresses=("203.0.113.5",)),
        "host name",
        "problem",
        "'host1' resolves to 203.0.113.5, which is not an address of this machine",
        "10.0.0.1 host1",
    ),
    "foreign name, Ray not asked": (
        machine(host_addresses=("203.0.113.5",), node_ip="127.0.0.1"),
        "host name",
        "problem",
        "203.0.113.5",
        "'10.0.0.1 host1'",
    ),
    "no name": (machine(host_missing="unknown"), "host name", "warning", "does not resolve: unknown", "10.0.0.1 host1"),
    "no name on Windows": (machine(host_missing="11001", platform="win32"), "host name", "problem", "11001", "hosts"),
    "slow name": (machine(host_lookup_s=4.2), "host name", "warning", "took 4.2 s", "name server"),
    "loopback name": (machine(host_addresses=("127.0.1.1",)), "host name", "ok", "127.0.1.1", ""),
    "no interface": (machine(network=NetworkInfo()), "interfaces", "problem", "no network interface is up", "loopback"),
    "unknown interface": (
        machine(env={"GLOO_SOCKET_IFNAME": "^lo,docker"}),
        "interfaces",
        "problem",
        "names '^lo', which is none of lo, eth0",
        "unset GLOO_SOCKET_IFNAME",
    ),
    "vgpu": (machine(gpu(), vgpu_preloaded=True), "environment", "warning", "libvgpu", "on_shared_device='gloo'"),
    "libuv": (machine(platform="win32", env={"USE_LIBUV": "1"}), "environment", "warning", "USE_LIBUV=1", "unset"),
    "variables": (machine(env={"NCCL_DEBUG": "INFO"}), "environment", "ok", "NCCL_DEBUG=INFO", ""),
    "tiny shm": (
        machine(shm_total_bytes=64 << 20, shm_free_bytes=63 << 20),
        "/dev/shm",
        "problem",
        "63 MiB free of 64 MiB",
        "--shm-size=1g",
    ),
    "full shm": (machine(shm_free_bytes=1 << 20), "/dev/shm", "problem", "1 MiB free of 8.0 GiB", "--shm-size"),
    "small shm": (
        machine(shm_total_bytes=512 << 20, shm_free_bytes=512 << 20),
        "/dev/shm",
        "warning",
        "little",
        "--shm-size",
    ),
    "no host memory": (machine(ipc_host_memory_missing="no memfd"), "ipc", "warning", "no memfd", "optional"),
    "no device memory": (machine(gpu(), ipc_device_memory_missing="no"), "ipc", "warning", "device memory", "gloo"),
    "no staging": (machine(staged_missing="torch 2.6 cannot"), "staged", "warning", "torch 2.6 cannot", "torch 2.7"),
    "not Linux": (machine(platform="darwin", ipc_host_memory_missing="x"), "ipc", "ok", "needs Linux", ""),
}


@pytest.mark.parametrize(("facts", "name", "level", "text", "fix"), CASES.values(), ids=CASES)
def test_line(facts, name, level, text, fix):
    """Each fault leads to the correct line with the correct fix, and the other lines are ok."""
    found = line(facts, name)
    assert (found.level, text in found.text, fix in found.fix) == (level, True, True), found
    assert bool(found.fix) == bool(fix)


def test_versions_that_are_both_old():
    """The fix is a command that pip accepts, with one requirement per package."""
    found = line(machine(ray_version="2.39.0", torch_version="2.3.1"), "versions")
    assert found.fix == "pip install 'ray[train]>=2.40' 'torch>=2.4'"
    assert [Requirement(part).name for part in found.fix.split("'")[1::2]] == ["ray", "torch"]


def test_a_version_that_is_not_one():
    """A custom build has its own version string."""
    assert line(machine(torch_version="my-build"), "versions").level == "ok"


def test_without_devices():
    """A CPU-only machine is ok, and the line states what its GPU workers need."""
    found = line(machine(cuda_missing="torch 2.13.0+cpu is a CPU-only build"), "CUDA devices")
    assert found.level == "ok"
    assert found.text.endswith("CPU workers train on the CPU; GPU workers need on_missing_cuda='cpu'")


def failed(stage, kind="error", text="OSError: broken", missing=None, also=()):
    """Return a machine with a failed stage, without the values of the stages that need it."""
    not_done = {stage, *also, *(name for name, each in STAGES.items() if stage in each.needs)}
    driver = None if "driver" in not_done else "570.1"
    return machine(failures={stage: Failure(kind, text, missing)}, not_done=frozenset(not_done), driver_version=driver)


FAILURES = {
    "no ray": (
        failed("ray", text="ModuleNotFoundError: No module named 'ray'", missing="ray"),
        "versions",
        "ray is not installed for this Python",
        "pip install 'ray[train]>=2.40'",
    ),
    "ray without its train": (
        failed("ray.train", text="ModuleNotFoundError: No module named 'pyarrow'", missing="pyarrow"),
        "versions",
        "ray.train cannot be imported: ModuleNotFoundError: No module named 'pyarrow'",
        "pip install 'ray[train]>=2.40', which installs pyarrow",
    ),
    "torch without a library": (
        failed("torch", text="OSError: libcudart.so.12: cannot open shared object file"),
        "versions",
        "torch cannot be imported: OSError: libcudart.so.12: cannot open shared object file",
        "LD_LIBRARY_PATH",
    ),
    "torch crashes": (failed("torch", "crash", "SIGILL"), "versions", "ends the process: SIGILL", "--force-reinstall"),
    "slow import": (failed("torch", "timeout", "45"), "versions", "did not end within 45 s", "--timeout-s"),
    "driver hangs": (
        failed("driver", "timeout", "45"),
        "CUDA devices",
        "the driver did not answer within 45 s (nvmlInit)",
        "nvidia-smi",
    ),
    "CUDA hangs": (failed("CUDA devices", "timeout", "45"), "CUDA devices", "within 45 s (torch.cuda)", "reboot"),
    "CUDA crashes": (failed("CUDA devices", "crash", "SIGABRT"), "CUDA devices", "SIGABRT", "nvidia-smi"),
    "Gloo hangs": (failed("Gloo", "timeout", "45"), "Gloo", "no answer within 45 s", "--timeout-s"),
    "ipc fails": (failed("ipc"), "ipc", "the check failed: OSError: broken", "report this"),
    "no psutil": (
        failed("interfaces", text="ModuleNotFoundError: ...", missing="psutil"),
        "interfaces",
        "psutil is not installed",
        "pip install psutil",
    ),
}


@pytest.mark.parametrize(("facts", "name", "text", "fix"), FAILURES.values(), ids=FAILURES)
def test_failed_stages(facts, name, text, fix):
    """A failed stage is a problem with cause and fix, and nothing that was not checked is reported as ok."""
    found = line(facts, name)
    assert (found.level, text in found.text, fix in found.fix) == ("problem", True, True), found
    checks = check_machine(facts)
    assert not {check.name for check in checks if check.level == "ok"} & facts.not_done
    has_line = {check.name for check in checks}
    unnamed = facts.not_done - has_line - {"ray", "torch", "ray.train", "driver"}
    assert all(name in line(facts, "not checked").text for name in unnamed)


def test_a_driver_without_torch():
    """The driver's GPUs are shown if torch cannot be imported, and nothing is compared with an unknown number of GPUs."""
    facts = replace(failed("torch"), driver_gpus=("NVIDIA H200", "NVIDIA H200"), driver_cuda="13.0", ray_gpus=2.0)
    assert line(facts, "driver").text == "NVIDIA 570.1 for CUDA 13.0: 2 x NVIDIA H200"
    assert line(facts, "Ray's GPUs").level == "problem"
    unknown = replace(facts, num_node_devices=None)
    assert "Ray's GPUs" not in {check.name for check in check_machine(unknown)}


def nvml(**functions):
    """Return a pynvml with these functions; all others raise its error."""

    class Refused(Exception):
        pass

    def refuse(*_):
        raise Refused

    names = (
        *("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName"),
        *("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetDriverVersion"),
    )
    working = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None, **functions}
    return SimpleNamespace(NVMLError=Refused, **{**dict.fromkeys(names, refuse), **working})


COUNTS = {
    "no NVML": (None, None),
    "NVML does not count": (nvml(), None),
    "NVML counts": (nvml(nvmlDeviceGetCount=lambda: 8), 8),
}


@pytest.mark.parametrize(("module", "count"), COUNTS.values(), ids=COUNTS)
def test_gpus_of_the_node(monkeypatch, module, count):
    """The driver's stage reports NVML's number of GPUs, unknown if NVML does not count them."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = STAGES["driver"].run(Found(), "127.0.0.1").machine
    assert found.get("num_node_devices") == count


@pytest.mark.parametrize("visible", [None, "", "0,1"])
def test_visible_devices(monkeypatch, visible):
    """The report contains the variable as set on the machine; an empty value hides all devices and differs from an unset variable."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert STAGES["host name"].run(Found(), "127.0.0.1").machine["cuda_visible_devices"] == visible


def test_block_for_an_issue():
    """The text contains the block before the verdict, and so does the JSON; devices are counted, and nodes have one line each."""
    facts = machine(gpu(total_memory_bytes=141 << 30), driver_version="570.1", driver_cuda="12.8", os_text="Linux-6.8")
    facts = replace(facts, variables={"NCCL_DEBUG": "INFO"}, torch_built_for="CUDA 13.0")
    environment = environment_of(facts, [facts, facts])
    text = Diagnosis({"node": ()}, environment=environment).to_text().split("\n\nPaste this into an issue:\n\n")[1]
    shown = text.removesuffix("\n\n0 problems, 0 warnings")
    lines = [part.strip() for part in shown.splitlines()]
    assert all(part.startswith("    ") for part in shown.splitlines())
    for expected in ("Linux-6.8", "2.60.0", "570.1 (CUDA 12.8)", "1 x NVIDIA H200 (141.0 GiB)", "NCCL_DEBUG=INFO"):
        assert any(part.endswith(expected) for part in lines), expected
    assert sum("10.0.0.1: ray_fracbackend 0.1.0, Ray 2.60.0" in part for part in lines) == 2
    assert Diagnosis({}, environment=environment).to_dict()["environment"]["variables"] == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize("stage", ["ray", "torch", "driver", "NCCL"])
def test_block_without_a_stage(stage):
    """Unknown values are not shown as missing."""
    facts = failed(stage, also=("driver", "CUDA devices"))
    facts = replace(facts, worker=replace(facts.worker, ray_version="", torch_version=""))
    environment = environment_of(facts)
    text = "\n".join(environment_lines(environment))
    assert environment["GPUs"] == "unknown"
    assert "cannot be imported (error: OSError: broken)" in text or stage not in ("ray", "torch")


def test_no_secrets(monkeypatch):
    """Only variables of the list are shown, and none that may contain a secret."""
    for name in ("NCCL_DEBUG", "RAY_TRAIN_X", "RAY_AUTH_MODE", "USE_LIBUV"):
        monkeypatch.setenv(name, "shown")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "WANDB_API_KEY", "RAY_TRAIN_TOKEN", "NCCL_X_KEY", "HOME"):
        monkeypatch.setenv(name, "hidden")
    # The doctor's lines and a start's report show these variables; so does the block for an issue.
    used = _variables(("NCCL_", "GLOO_"))
    assert used.get("NCCL_DEBUG") == "shown"
    assert "hidden" not in used.values()
    assert [probe._is_shown(name) for name in ("NCCL_DEBUG", "NCCL_X_KEY", "NCCL_FOO_TOKEN")] == [True, False, False]
    found = shown_variables()
    assert {"NCCL_DEBUG", "RAY_TRAIN_X", "RAY_AUTH_MODE", "USE_LIBUV"} <= set(found)
    assert "hidden" not in found.values()


# The parent imports neither Ray nor torch, whatever the child does.
_REPORT = """
import json, sys
from ray_fracbackend.cli.doctor.diagnose import diagnose_machine
found = diagnose_machine(float(sys.argv[1]))
assert not {"ray", "torch", "psutil", "pynvml"} & set(sys.modules)
print(json.dumps(found.to_dict()))
"""
_LIGHT = {
    "ray": "__version__ = '2.60.0'",
    "torch": "raise OSError('libcudart.so.12: cannot open')",
    "pynvml": "raise ImportError",
}


def fake_packages(folder, **bodies):
    """Return PYTHONPATH with modules of these bodies before all others."""
    for name, body in {**_LIGHT, **bodies}.items():
        (folder / f"{name}.py").write_text(body)
    return os.pathsep.join([str(folder), python_path()])


def report(folder, timeout_s=60, **bodies):
    """Return the doctor's checks by name for modules with these bodies, and its seconds; it writes nothing to the terminal."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _REPORT, str(timeout_s)],
        env={**os.environ, "PYTHONPATH": fake_packages(folder, **bodies)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (node,) = json.loads(done.stdout)["nodes"]
    return node["checks"], time.monotonic() - started


def texts(checks, name):
    return [check["text"] for check in checks if check["name"] == name]


def test_import_that_raises(tmp_path):
    """The line contains the error, a library's own output is not on the terminal, and everything else is checked."""
    checks, _ = report(tmp_path, ray="print('noise'); raise ImportError('cannot import name x\\nmore')")
    assert texts(checks, "versions") == [
        "ray cannot be imported: ImportError: cannot import name x",
        "torch cannot be imported: OSError: libcudart.so.12: cannot open",
    ]
    assert {"host name", "interfaces", "environment"} <= {check["name"] for check in checks}
    assert texts(checks, "not checked") == ["CUDA devices, NCCL, ipc, staged, Gloo"]


CRASHES = {
    "exit code": ("import os; os._exit(7)", "exit code 7"),
    "sys.exit": ("import sys; sys.exit(7)", "torch cannot be imported: SystemExit: 7"),
    "signal": (
        "import os, signal; print('cause', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
        "SIGKILL (cause)",
    ),
}


@pytest.mark.linux(reason="Windows has no signals, and another exit code")
@pytest.mark.parametrize(("body", "text"), CRASHES.values(), ids=CRASHES)
def test_import_that_ends_the_process(tmp_path, body, text):
    """The line contains the signal or exit code with the last output, and another child runs the other stages."""
    checks, _ = report(tmp_path, torch=body)
    (found,) = texts(checks, "versions")
    assert text in found
    assert {"host name", "interfaces"} <= {check["name"] for check in checks}


def test_driver_that_hangs(tmp_path):
    """If nvmlInit never returns, there is a line within the time limit, and its process is ended."""
    checks, took_s = report(tmp_path, 5, pynvml="import time\ndef nvmlInit(): time.sleep(600)")
    (found,) = texts(checks, "CUDA devices")
    assert found.startswith("the driver did not answer within ")
    assert took_s < 15
    assert no_child_is_left(tmp_path)


def test_no_time_at_all(tmp_path):
    """A time limit that is too short is reported as a problem and does not hang."""
    checks, took_s = report(tmp_path, 0.01, torch="import time; time.sleep(600)")
    assert any(check["level"] == "problem" and "--timeout-s" in check["fix"] for check in checks)
    assert took_s < 15


@pytest.mark.full
@pytest.mark.parametrize("package", ["ray", "torch"])
def test_import_that_hangs(tmp_path, package):
    """The same for an import that hangs."""
    checks, took_s = report(tmp_path, 5, **{package: "import time; time.sleep(600)"})
    assert any(text.startswith(f"the import of {package} did not end within ") for text in texts(checks, "versions"))
    assert took_s < 15
    assert no_child_is_left(tmp_path)


class Through:
    """A child that has finished every stage and keeps its pipe open."""

    def __init__(self):
        self.events, self.stopped = queue.SimpleQueue(), False

    def stop(self):
        self.stopped = True


def test_a_child_that_does_not_end(monkeypatch):
    """The child is stopped after its time limit, and nothing is reported as failed."""
    child = Through()
    monkeypatch.setattr(collect, "_Child", lambda request: child)
    with collect.Collector(0.3) as collector:
        collector.done.update(STAGES)
        collector.run()
    assert (child.stopped, collector.failures) == (True, {})


def no_child_is_left(folder):
    """Return whether all processes with the folder on their path end in time."""
    return wait_until(lambda: not processes_with("PYTHONPATH", str(folder)), 10)


ENDS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": 9}  # a name that Windows lacks


@pytest.mark.linux(reason="sends signals")
@pytest.mark.parametrize("ending", ENDS.values(), ids=ENDS)
def test_no_child_is_left(tmp_path, ending):
    """The processes of the child end with the command, however it ends."""
    grandchild = "import subprocess, time\ndef nvmlInit(): open('ready', 'w').close(); subprocess.run(['sleep', '600'])"
    command = with_signals(sys.executable, "-c", _REPORT, "60")
    environment = {**os.environ, "PYTHONPATH": fake_packages(tmp_path, pynvml=grandchild)}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        assert wait_until((tmp_path / "ready").exists, 60)
        process.send_signal(ending)
        process.wait(20)
    assert no_child_is_left(tmp_path)


def test_no_shm_no_line():
    """Systems without /dev/shm have no line about it."""
    assert not [c for c in check_machine(machine(shm_total_bytes=None, shm_free_bytes=None)) if c.name == "/dev/shm"]


NODES = {
    "loopback name": (machine(host_addresses=("127.0.1.1",)), "host name", "warning", "127.0.1.1"),
    "loopback node": (machine(node_ip="127.0.0.1"), "interfaces", "problem", "address of this node is 127.0.0.1"),
    "translated address": (
        machine(node_ip="192.0.2.7"),
        "interfaces",
        "warning",
        "no interface has the node's address",
    ),
}


@pytest.mark.parametrize(("facts", "name", "level", "text"), NODES.values(), ids=NODES)
def test_line_of_a_node_among_others(facts, name, level, text):
    """Some values are ok on one machine but not between several."""
    assert line(facts, name).level == "ok"
    found = line(facts, name, num_nodes=2)
    assert (found.level, text in found.text) == (level, True), found
    assert found.fix


def test_equal_nodes():
    """One line states that the nodes are equal; a single machine has nothing to compare."""
    assert check_cluster([machine()]) == ()
    (found,) = check_cluster([machine(gpu("a")), machine(gpu("b"), node="2")])
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("system", {"platform": "win32"}),
        ("ray_fracbackend", {"package_version": "0.2.0"}),
        ("Python", {"python_version": "3.12.1"}),
        ("torch", {"torch_version": "2.14.0"}),
        ("NCCL", {"nccl_version": (2, 30, 0)}),
    ],
)
def test_mixed_nodes(name, facts):
    """If a difference breaks a job, the line names the values and the nodes."""
    (found,) = check_cluster([machine(gpu("a")), machine(gpu("b"), node="2", **facts)])
    assert (found.name, found.level) == (name, "problem")
    assert "10.0.0.1" in found.text
    assert "10.0.0.2" in found.text
    assert found.fix


def test_python_patch_versions_may_differ():
    """Ray treats 3.11.7 and 3.11.9 as the same Python."""
    (found,) = check_cluster([machine(), machine(node="2", python_version="3.11.9")])
    assert found.level == "ok"


def test_one_device_on_two_nodes():
    """With containers of one machine Ray assigns the device twice."""
    found = check_cluster([machine(gpu()), machine(gpu(), node="2")])[-1]
    assert (found.name, found.level) == ("CUDA devices", "warning")
    assert "GPU-a belongs to nodes 10.0.0.1, 10.0.0.2" in found.text


def test_text_and_json():
    """The text has each fix below its line and colours only on request; the JSON contains everything; a warning is not a problem."""
    fine, doubt = Check("NCCL", "ok", "2.28.9"), Check("/dev/shm", "warning", "little", "more")
    found = Diagnosis({"node a": (fine, doubt)})
    assert found.problems() == []
    assert "  warning  /dev/shm      little\n" in found.to_text()
    assert found.to_text().endswith("fix: more\n\n0 problems, 1 warning (/dev/shm)")
    assert "\x1b" not in found.to_text()
    assert "\x1b[33mwarning \x1b[0m" in found.to_text(color=True)
    assert json.loads(json.dumps(found.to_dict()))["nodes"][0]["checks"][1]["fix"] == "more"
    worse = Diagnosis(found.nodes, (Check("torch", "problem", "differs", "install one"),))
    assert worse.problems() == ["torch: differs"]
    assert "between the nodes\n  problem  torch" in worse.to_text()
    assert worse.to_text().endswith("\n\n1 problem (torch), 1 warning (/dev/shm)")


def cluster_of(*nodes):
    """What the doctor finds on nodes with addresses and host names of their own: 10.0.0.1 is `a`, and so on."""
    checks, own = {}, {}
    for index, facts in enumerate(nodes, 1):
        address, name = f"10.0.0.{index}", "abcdefgh"[index - 1]
        network = NetworkInfo(interfaces={"lo": ("127.0.0.1",), "eth0": (address,)})
        device = gpu(name) if facts.pop("has_gpu", False) else None
        node = {"node_ip": address, "hostname": name, "host_addresses": (address,), **facts}
        found = machine(device, network=network, **node)
        checks[f"node {address} ({name})"] = check_machine(found, len(nodes))
        own[f"node {address} ({name})"] = own_values(found)
    return Diagnosis(checks, own_values=own)


def test_equal_nodes_are_one_block():
    """Addresses, host names, GPUs and free memory make no difference, and each line is there once."""
    shm = [{"has_gpu": True, "shm_total_bytes": 512 << 20, "shm_free_bytes": free << 20} for free in (500, 400, 300)]
    found = cluster_of(*shm)
    text = found.to_text()
    assert text.startswith(
        "3 equal nodes; the lines show names and addresses of the first one\n"
        "  node 10.0.0.1 (a), node 10.0.0.2 (b), node 10.0.0.3 (c)\n"
    )
    for name in ("versions", "cuda:0", "Gloo", "host name", "interfaces", "/dev/shm"):
        assert len(re.findall(rf"^  (?:ok|warning) +{re.escape(name)} ", text, re.MULTILINE)) == 1, name
    assert text.endswith("\n\n0 problems, 1 warning (/dev/shm)")
    assert len(found.to_dict()["nodes"]) == 3, "JSON has every node with its own lines"
    assert len({str(node["checks"]) for node in found.to_dict()["nodes"]}) == 3


def test_a_warning_of_nodes_that_differ_is_one_line():
    """With the names of its nodes; what one kind of nodes has stays in its block."""
    little, old = {"shm_total_bytes": 512 << 20, "shm_free_bytes": 500 << 20}, {"ray_version": "2.39.0"}
    text = cluster_of(dict(little), {**little, **old}, {}, dict(old)).to_text()
    block = text.partition("several nodes; each line shows names and addresses of its first node\n")[2]
    assert "  problem  versions      ray_fracbackend 0.1.0, ray 2.39.0" in block
    assert f"{'':25}on:  node 10.0.0.2 (b), node 10.0.0.4 (d)\n" in block
    assert f"{'':25}on:  node 10.0.0.1 (a), node 10.0.0.2 (b)\n" in block
    assert len(re.findall("^  warning +/dev/shm ", text, re.MULTILINE)) == 1
    assert text.endswith("\n\n1 problem (versions), 1 warning (/dev/shm)")
    one = cluster_of({}, {}, dict(old)).to_text()
    assert one.startswith("2 equal nodes; ")
    assert "\nnode 10.0.0.3 (c)\n  problem  versions " in one
    assert "several nodes;" not in one


def test_a_cause_with_advice_of_its_own_is_the_fix():
    """If CUDA's error has its own advice, it is the fix, because the general advice would be wrong."""
    cause = 'the NVIDIA Fabric Manager is not running (CUDA says "Error 802"); start nvidia-fabricmanager'
    facts = machine(devices=(), num_node_devices=8, cuda_missing=cause, cuda_visible_devices="0")
    (check,) = [check for check in check_machine(facts) if check.name == "CUDA devices"]
    assert (check.level, check.fix) == ("problem", "start nvidia-fabricmanager")
    assert check.text.endswith('is not running (CUDA says "Error 802")')
