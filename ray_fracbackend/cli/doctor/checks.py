"""Checks of ``ray-fracbackend doctor``: convert facts about machines to lines with a level and a fix. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from packaging.version import Version

from ray_fracbackend import __version__
from ray_fracbackend.cli.doctor.facts import Facts
from ray_fracbackend.cli.doctor.report import Check
from ray_fracbackend.decide.addresses import is_loopback, normal, owner_of
from ray_fracbackend.decide.device_sharing import short_uuid
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.decide.nccl import NCCL_COMPARES_UUID, NCCL_IFNAME, matching
from ray_fracbackend.decide.plain import from_plain
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo, version_text
from ray_fracbackend.errors import FracBackendError

# Oldest supported versions.
_OLDEST = {"ray": "2.40", "torch": "2.4"}
_INSTALL = {"ray": f"'ray[train]>={_OLDEST['ray']}'", "torch": f"'torch>={_OLDEST['torch']}'"}
# By the stage that failed.
_FIXES = {
    **{name: f"pip install --force-reinstall {package}" for name, package in _INSTALL.items()},
    **dict.fromkeys(("driver", "CUDA devices"), "run nvidia-smi to see whether the driver answers"),
    "Gloo": f"see the line on interfaces, or set {IFNAME}",
    "node": f"look at its load and logs; it needs ray_fracbackend {__version__}, as this machine",
}
_VC_RUNTIME = "install the Microsoft Visual C++ Redistributable for x64: https://aka.ms/vs/17/release/vc_redist.x64.exe"
# Docker's default is 64 MiB; NCCL's troubleshooting guide asks for 1 GiB.
_SHM_PROBLEM_BYTES, _SHM_WARNING_BYTES = 64 << 20, 1 << 30


def check_machine(facts: Facts) -> tuple[Check, ...]:
    """Return all lines about a machine; the facts of a node have also its cluster's ``num_nodes`` and Ray's ``num_gpus``."""
    checks = [*_failure(facts), *_versions(facts)]
    if "unusable_paths" in facts:
        checks.append(_paths(facts))
    if "worker" in facts:
        worker: WorkerInfo = from_plain(WorkerInfo, facts["worker"])
        checks += [*_devices(worker, facts), _nccl(worker)]
    if "gloo_interface" in facts:
        checks.append(Check("Gloo", "ok", f"can use {facts['gloo_interface'] or 'the interface of the host name'}"))
    if "interfaces" in facts:
        several_nodes = facts.get("num_nodes", 1) > 1
        checks += [_host_name(facts, several_nodes), _interfaces(facts, several_nodes)]
    if facts.get("name_server_silent"):
        text = (
            "no answer within a second: torch's store asks it for the name of every peer and serves no rank meanwhile"
        )
        checks.append(Check("name server", "warning", text, "correct /etc/resolv.conf"))
    if facts.get("shm_bytes"):
        checks.append(_shm(*facts["shm_bytes"]))
    return tuple(checks)


def check_cluster(nodes: Sequence[Facts]) -> tuple[Check, ...]:
    """Return a line if systems or versions of the nodes of one cluster differ."""
    examples = {
        f"{facts['platform']}, Python {facts['Python'].rpartition('.')[0]}, torch {facts['torch']}": facts["node_ip"]
        for facts in nodes
        if "torch" in facts
    }
    if len(examples) < 2:
        return ()
    text = "; ".join(f"{versions} on {address}" for versions, address in examples.items())
    fix = "install the same versions on every node, and place each job on nodes of one system"
    return (Check("versions", "problem", f"differ: {text}", fix),)


def environment_variables(facts: Facts) -> dict[str, str]:
    """Return versions, GPUs and variables of a machine, for an issue."""
    names = ("OS", "Python", "ray_fracbackend", "ray", "torch", "NCCL", "NVIDIA driver", "GPUs", "failure")
    return {**{name: facts[name] for name in names if facts.get(name)}, **facts.get("variables", {})}


def _failure(facts: Facts) -> Iterator[Check]:
    if stage := facts.get("failed_stage"):
        text = f"the import of {stage} {facts['failure']}" if stage in _OLDEST else facts["failure"]
        has_no_runtime = re.search(r"\[WinError (126|1114)\]", text)
        yield Check(stage, "problem", text, _VC_RUNTIME if has_no_runtime else _FIXES.get(stage, ""))


def _versions(facts: Facts) -> Iterator[Check]:
    found = {name: facts[name] for name in _OLDEST if name in facts}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    old = [_INSTALL[name] for name, version in found.items() if Version(version) < Version(_OLDEST[name])]
    if old:
        yield Check("versions", "problem", text, f"pip install {' '.join(old)}")
    elif facts.get("platform") == "win32" and facts["variables"].get("USE_LIBUV") == "1":
        text += "; torch's wheels for Windows do not support USE_LIBUV=1"
        yield Check("versions", "warning", text, "unset USE_LIBUV; FracTorchConfig overrides it")
    elif found:
        yield Check("versions", "ok", text)


def _paths(facts: Facts) -> Check:
    """Check the paths of a Windows machine."""
    if facts["unusable_paths"]:
        text = f"Ray does not start with letters as in {', '.join(facts['unusable_paths'])}"
        fix = "set RAY_TMPDIR to a folder with ASCII letters only, and create the virtual environment in such a folder"
        return Check("paths", "problem", text, fix)
    if facts["in_onedrive"]:
        text = "the current folder is in OneDrive, which may hold new files open"
        return Check("paths", "warning", text, "work in another folder, and set storage_path to one")
    if not facts.get("has_long_paths"):
        fix = r"as administrator: reg add HKLM\SYSTEM\CurrentControlSet\Control\FileSystem /v LongPathsEnabled /t REG_DWORD /d 1 /f"
        return Check("paths", "warning", "at most 260 characters; results of Ray Tune may have more", fix)
    return Check("paths", "ok", "long ones are allowed")


def _devices(worker: WorkerInfo, facts: Facts) -> Iterator[Check]:
    num_gpus, claimed = facts.get("num_driver_gpus", 0), facts.get("num_gpus")
    if worker.devices:
        yield from (_device(device, worker) for device in worker.devices)
    elif num_gpus:
        is_hidden = facts["variables"].get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        text = f"torch uses none of the machine's {num_gpus} GPUs: {worker.cuda_missing}"
        yield Check("CUDA devices", "warning" if is_hidden else "problem", text)
    else:
        yield Check("CUDA devices", "ok", f"none ({worker.cuda_missing}): GPU workers need on_missing_cuda='cpu'")
    # Of a GPU in MIG mode Ray has the whole GPU or the slices, as configured.
    if claimed is not None and not any(device.is_mig for device in worker.devices):
        present = max(worker.num_visible_devices, num_gpus)
        text = f"num_gpus={claimed:g} of the node, and {present} GPUs are present"
        fix = f"start Ray there with --num-gpus={present}, or train with FracTorchConfig(on_missing_cuda='cpu')"
        is_wrong = claimed > present
        yield Check("Ray's GPUs", "problem" if is_wrong else "ok", text, fix if is_wrong else "")


def _device(device: DeviceInfo, worker: WorkerInfo) -> Check:
    name, uuid = f"cuda:{device.index}", short_uuid(device.uuid)
    text = f"{device.name}, {device.total_memory_bytes / 2**30:.1f} GiB, compute mode {device.compute_mode}"
    if device.compute_mode == "prohibited":
        return Check(name, "problem", f"{text}: no process can use it", "nvidia-smi -c DEFAULT", uuid)
    pair = [replace(worker, rank=rank, resources={"GPU": 0.5}, devices=(device,)) for rank in range(2)]
    try:
        decision = decide_start(pair, Settings())
    except FracBackendError as error:
        return Check(name, "warning", f"{text}: workers cannot share it", detail=f"{uuid}: {error}")
    text += f": workers that share it use {decision.backend}"
    if device.is_mig and worker.nccl_available and (worker.nccl_version or (0, 0, 0)) < NCCL_COMPARES_UUID:
        text += ", and so do those on other MIG slices of its GPU, which NCCL refuses"
        return Check(name, "warning", text, "install NCCL 2.30.7 or newer", uuid)
    return Check(name, "ok", text, detail=uuid)


def _nccl(worker: WorkerInfo) -> Check:
    if worker.nccl_version:
        return Check("NCCL", "ok", f"{version_text(worker.nccl_version)} is loaded")
    text = "its version cannot be read" if worker.nccl_available else "not in this build of torch"
    if not worker.devices:
        return Check("NCCL", "ok", f"{text}, and not needed without CUDA devices")
    return Check("NCCL", "warning", text, "" if worker.platform == "win32" else "install a torch build with NCCL")


def _host_name(facts: Facts, several_nodes: bool) -> Check:
    """Check the machine's own host name: Gloo without an interface name, and other software, uses its address."""
    addresses, own = facts["host_addresses"], [each for found in facts["interfaces"].values() for each in found]
    level, detail = "warning", f"{facts['hostname']!r}: {', '.join(addresses)}"
    if "host_missing" in facts:
        # On Windows, Gloo's own lookup then reads an uninitialized pointer.
        level = "problem" if facts["platform"] == "win32" else "warning"
        text = f"does not resolve: {facts['host_missing']}"
    elif own and any(normal(each) not in own and not is_loopback(each) for each in addresses):
        level, text = "problem", "resolves to an address that this machine does not have"
    elif several_nodes and is_loopback(addresses[0]):
        text = "resolves to loopback, which other nodes cannot reach; FracTorchConfig uses IP addresses instead"
    else:
        return Check("host name", "ok", "resolves", detail=detail)
    fix = "write name and address of the machine into its hosts file, or correct the name server"
    return Check("host name", level, text, fix, detail)


def _interfaces(facts: Facts, several_nodes: bool) -> Check:
    known, node_ip, named = facts["interfaces"], facts["node_ip"], facts["variables"].get(IFNAME, "")
    level, detail = "problem", ", ".join(f"{name} {addresses[0]}" for name, addresses in known.items())
    if not known:
        text, fix = "none is up", "bring at least the loopback interface up"
    elif any(name not in known for name in named.split(",") if name):
        text, fix = f"{IFNAME}={named} names one that does not exist", f"unset {IFNAME}, or list whole names"
    elif (nccl := facts["variables"].get(NCCL_IFNAME)) and not matching(nccl, list(known)):
        level, text, fix = "warning", f"{NCCL_IFNAME}={nccl} matches none", f"correct or unset {NCCL_IFNAME}"
    elif several_nodes and is_loopback(node_ip):
        text = f"Ray's address of this node is {node_ip}, which no other node can reach"
        fix = "start Ray there with --node-ip-address=ADDRESS"
    elif several_nodes and owner_of(known, node_ip) is None:
        level, text = "warning", "none has Ray's address of the node: a translated address (NAT)"
        fix = "run the container with --network=host: Gloo's ports are random"
    else:
        level, text, fix = "ok", "up", ""
    return Check("interfaces", level, text, fix, detail)


def _shm(total_bytes: int, free_bytes: int) -> Check:
    text, detail = f"{total_bytes / 2**30:.3g} GiB", f"{free_bytes / 2**30:.3g} GiB free"
    if free_bytes > _SHM_PROBLEM_BYTES and total_bytes >= _SHM_WARNING_BYTES:
        return Check("/dev/shm", "ok", text, detail=detail)
    level = "problem" if free_bytes <= _SHM_PROBLEM_BYTES else "warning"
    text += ", too little for NCCL, data loader workers and Ray's object store"
    fix = "--shm-size=1g or --ipc=host (Docker); an emptyDir with medium: Memory (Kubernetes)"
    return Check("/dev/shm", level, text, fix, detail)
