"""The doctor's lines: from reports to levels. Collecting on real machines is tested in tests/ray/test_doctor.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ray_fracbackend.cli.checks import Check, Diagnosis, MachineInfo, check_cluster, check_machine
from ray_fracbackend.decide.worker_info import NetworkInfo
from tests.unit.builders import gpu, mig, worker

_NETWORK = NetworkInfo(interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)})


def machine(device=None, network=_NETWORK, **facts):
    """A healthy machine, except for the given attributes; those of WorkerInfo go there."""
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
            **own,
        }
    )


def line(facts, name, num_nodes=1):
    """The worst line of a name."""
    found = [check for check in check_machine(facts, num_nodes) if check.name == name]
    return max(found, key=lambda check: ("ok", "warning", "problem").index(check.level))


@pytest.mark.parametrize("device", [None, gpu()], ids=["cpu", "gpu"])
def test_healthy_machine(device):
    """Nothing but ok, and no fix for what is not broken."""
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
        "'host1' resolves to 203.0.113.5, which is no address of this machine",
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
    "no interface": (machine(network=NetworkInfo()), "interfaces", "problem", "none is up", "loopback"),
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
    """Each fault is the right line with the right fix, and the other lines are ok."""
    found = line(facts, name)
    assert (found.level, text in found.text, fix in found.fix) == (level, True, True), found
    assert bool(found.fix) == bool(fix)


def test_no_shm_no_line():
    """Systems without /dev/shm have no line on it."""
    assert not [c for c in check_machine(machine(shm_total_bytes=None, shm_free_bytes=None)) if c.name == "/dev/shm"]


NODES = {
    "loopback name": (machine(host_addresses=("127.0.1.1",)), "host name", "warning", "127.0.1.1"),
    "loopback node": (machine(node_ip="127.0.0.1"), "interfaces", "problem", "knows this node as 127.0.0.1"),
    "translated address": (machine(node_ip="192.0.2.7"), "interfaces", "warning", "none has the node's address"),
}


@pytest.mark.parametrize(("facts", "name", "level", "text"), NODES.values(), ids=NODES)
def test_line_of_a_node_among_others(facts, name, level, text):
    """What is fine on one machine is not between several."""
    assert line(facts, name).level == "ok"
    found = line(facts, name, num_nodes=2)
    assert (found.level, text in found.text) == (level, True), found
    assert found.fix


def test_equal_nodes():
    """One line says that nodes are of one kind; a single machine has nothing to compare."""
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
    """A difference that a job does not survive names the values and the nodes."""
    (found,) = check_cluster([machine(gpu("a")), machine(gpu("b"), node="2", **facts)])
    assert (found.name, found.level) == (name, "problem")
    assert "10.0.0.1" in found.text
    assert "10.0.0.2" in found.text
    assert found.fix


def test_python_patch_versions_may_differ():
    """3.11.7 and 3.11.9 are one Python to Ray."""
    (found,) = check_cluster([machine(), machine(node="2", python_version="3.11.9")])
    assert found.level == "ok"


def test_one_device_on_two_nodes():
    """Containers of one machine: Ray gives the device out twice."""
    found = check_cluster([machine(gpu()), machine(gpu(), node="2")])[-1]
    assert (found.name, found.level) == ("CUDA devices", "warning")
    assert "GPU-a belongs to nodes 10.0.0.1, 10.0.0.2" in found.text


def test_text_and_json():
    """Text has a fix under its line and colours only where asked; JSON has all; a warning is no problem."""
    fine, doubt = Check("NCCL", "ok", "2.28.9"), Check("/dev/shm", "warning", "little", "more")
    found = Diagnosis({"node a": (fine, doubt)})
    assert found.ok
    assert "  warning  /dev/shm      little\n" in found.to_text()
    assert found.to_text().endswith("fix: more")
    assert "\x1b" not in found.to_text()
    assert "\x1b[33mwarning \x1b[0m" in found.to_text(color=True)
    assert json.loads(json.dumps(found.to_dict()))["nodes"][0]["checks"][1]["fix"] == "more"
    worse = Diagnosis(found.nodes, (Check("torch", "problem", "differs", "install one"),))
    assert not worse.ok
    assert "between the nodes\n  problem  torch" in worse.to_text()


def test_a_cause_with_advice_of_its_own_is_the_fix():
    """What CUDA's error means says what to do; the general advice would be wrong there."""
    cause = 'the NVIDIA Fabric Manager is not running (CUDA says "Error 802"); start nvidia-fabricmanager'
    facts = machine(devices=(), num_node_devices=8, cuda_missing=cause, cuda_visible_devices="0")
    (check,) = [check for check in check_machine(facts) if check.name == "CUDA devices"]
    assert (check.level, check.fix) == ("problem", "start nvidia-fabricmanager")
    assert check.text.endswith('is not running (CUDA says "Error 802")')
