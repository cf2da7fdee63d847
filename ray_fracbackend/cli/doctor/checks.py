"""Checks of ``ray-fracbackend doctor``: convert reports of machines to lines with a level and a fix. Pure.

collect.py collects the reports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from packaging.version import InvalidVersion, Version

from ray_fracbackend.cli.doctor.environment import counted
from ray_fracbackend.cli.doctor.failed_stages import (
    INSTALL_RAY,
    INSTALL_TORCH,
    failed_imports,
    failed_subjects,
    not_checked,
)
from ray_fracbackend.cli.doctor.report import Check, Level, MachineInfo
from ray_fracbackend.decide.addresses import is_loopback, normal, owner_of
from ray_fracbackend.decide.device_sharing import short_uuid
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.decide.nccl import NCCL_COMPARES_UUID, NCCL_MULTI_RANK
from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo, version_text

# Oldest versions that are supported.
_OLDEST = {"ray": "2.40", "torch": "2.4"}
_INSTALL = {"ray": INSTALL_RAY, "torch": INSTALL_TORCH}
# Docker's default is 64 MiB; NCCL's troubleshooting guide asks for 1 GiB.
_SHM_PROBLEM_BYTES, _SHM_WARNING_BYTES = 64 << 20, 1 << 30
_WITHOUT_DEVICES = "CPU workers train on the CPU; GPU workers need on_missing_cuda='cpu'"
# A name server that answers slower than this delays every connection by host name.
_SLOW_LOOKUP_S = 1.0


def check_machine(machine: MachineInfo, num_nodes: int = 1) -> tuple[Check, ...]:
    """Check one machine.

    Args:
        machine: Report of the machine.
        num_nodes: Number of nodes of its cluster.

    Returns:
        All lines about it, including one for checks that could not run.
    """
    return (
        *failed_imports(machine),
        *_versions(machine),
        *failed_subjects(machine),
        *_check_devices(machine),
        *([] if "Gloo" in machine.not_done else [_gloo(machine)]),
        *([] if "host name" in machine.not_done else [_host_name(machine, num_nodes)]),
        *([] if "interfaces" in machine.not_done else [_interfaces(machine.worker, num_nodes)]),
        _environment(machine),
        *_name_server(machine),
        *_shm(machine),
        *not_checked(machine),
    )


def own_values(machine: MachineInfo) -> dict[str, str]:
    """Return patterns for the values that differ between healthy nodes, such as addresses, and a placeholder for each."""
    worker = machine.worker
    known = worker.network.interfaces
    addresses = {worker.node_ip, *machine.host_addresses, *(address for each in known.values() for address in each)}
    uuids = [uuid for device in worker.devices for uuid in (device.uuid, device.parent_uuid) if uuid]
    values = {re.escape(_interfaces_text(worker)): "INTERFACES"}
    values |= {re.escape(address) + r"(?![\w.:])": "ADDRESS" for address in sorted(addresses, key=len, reverse=True)}
    # A host name may also be a word of a line. In the lines a quotation mark follows it.
    values |= {rf"(?<=[' ]){re.escape(worker.hostname)}(?=')": "HOST"} if worker.hostname else {}
    values |= {re.escape(short_uuid(uuid)): "GPU" for uuid in uuids}
    if machine.shm_free_bytes is not None:
        values[re.escape(_size(machine.shm_free_bytes)) + " free"] = "SOME free"
    return {pattern: word for pattern, word in values.items() if pattern}


def check_cluster(machines: Sequence[MachineInfo]) -> tuple[Check, ...]:
    """Compare the machines of one cluster; return no lines for a single machine."""
    if len(machines) < 2:
        return ()
    same: dict[str, Callable[[MachineInfo], str]] = {
        "system": lambda machine: machine.worker.platform,
        "ray_fracbackend": lambda machine: machine.package_version,
        "Python": lambda machine: ".".join(machine.python_version.split(".")[:2]),
        "torch": lambda machine: machine.worker.torch_version,
        "NCCL": lambda machine: version_text(machine.worker.nccl_version) if machine.worker.devices else "",
    }
    mixed = [check for name, value_of in same.items() if (check := _mixed(name, machines, value_of)) is not None]
    return (
        *(mixed or [Check("same", "ok", f"{len(machines)} nodes with the same {', '.join(same)}")]),
        *_doubles(machines),
    )


def _mixed(name: str, machines: Sequence[MachineInfo], value_of: Callable[[MachineInfo], str]) -> Check | None:
    nodes: dict[str, list[str]] = {}
    for machine in machines:
        if value := value_of(machine):
            nodes.setdefault(value, []).append(machine.worker.node_ip)
    if len(nodes) < 2:
        return None
    listed = "; ".join(f"{value} on {', '.join(on[:4])}{', ...' if len(on) > 4 else ''}" for value, on in nodes.items())
    fix = "place each job on nodes of one system" if name == "system" else f"install the same {name} on every node"
    return Check(name, "problem", f"differs: {listed}", fix)


def _doubles(machines: Sequence[MachineInfo]) -> list[Check]:
    """Find devices that several nodes report: containers of one machine, to which Ray allocates one device several times."""
    nodes: dict[str, list[str]] = {}
    for machine in machines:
        for device in machine.worker.devices:
            nodes.setdefault(device.uuid, []).append(machine.worker.node_ip)
    return [
        Check(
            "CUDA devices",
            "warning",
            f"{short_uuid(uuid)} belongs to nodes {', '.join(on)}: Ray allocates all of it on each",
            "assign different devices to each container, or start Ray there with fewer --num-gpus",
        )
        for uuid, on in nodes.items()
        if len(on) > 1
    ]


def _versions(machine: MachineInfo) -> list[Check]:
    known = {"ray": machine.worker.ray_version, "torch": machine.worker.torch_version}
    found = {name: version for name, version in known.items() if version}
    text = ", ".join(
        [f"ray_fracbackend {machine.package_version}", *(f"{name} {version}" for name, version in found.items())]
    )
    text = f"{text}, Python {machine.python_version} on {machine.worker.platform}"
    old = [name for name, version in found.items() if _is_older(version, _OLDEST[name])]
    if old:
        return [Check("versions", "problem", text, f"pip install {' '.join(_INSTALL[name] for name in old)}")]
    # A failed import has its own line.
    return [] if len(found) < len(known) else [Check("versions", "ok", text)]


def _is_older(version: str, oldest: str) -> bool:
    try:
        return Version(version) < Version(oldest)
    except InvalidVersion:  # a custom build
        return False


def _gloo(machine: MachineInfo) -> Check:
    over = machine.gloo_interface or "the host name's interface"
    if machine.worker.network.gloo_missing:
        fix = (
            "unset GLOO_DEVICE_TRANSPORT" if "GLOO_DEVICE_TRANSPORT" in machine.worker.env else "install another torch"
        )
        return Check("Gloo", "problem", machine.worker.network.gloo_missing, fix)
    if machine.gloo_device_missing:
        return Check("Gloo", "problem", machine.gloo_device_missing, f"see the line on interfaces, or set {IFNAME}")
    return Check("Gloo", "ok", f"Gloo can use {over}")


def _host_name(machine: MachineInfo, num_nodes: int) -> Check:
    """Check the machine's own host name: Gloo without an interface name, and other software, uses its address."""
    worker = machine.worker
    name, addresses = worker.hostname, ", ".join(machine.host_addresses)
    line = f"add the line '{_own_address(worker)} {name}' to the hosts file"
    if machine.host_missing is not None:
        # On Windows, Gloo's own lookup then reads an uninitialized pointer.
        level: Level = "problem" if worker.platform == "win32" else "warning"
        return Check("host name", level, f"{name!r} does not resolve: {machine.host_missing}", line)
    own = {address for found in worker.network.interfaces.values() for address in found}
    foreign = [a for a in machine.host_addresses if own and normal(a) not in own and not is_loopback(a)]
    if foreign:
        text = f"{name!r} resolves to {foreign[0]}, which is not an address of this machine"
        return Check("host name", "problem", text, f"correct the hosts file or the name server: {line}")
    if machine.host_lookup_s > _SLOW_LOOKUP_S:
        text = f"{name!r} took {machine.host_lookup_s:.1f} s to resolve"
        return Check("host name", "warning", text, f"correct the name server, or {line}")
    if num_nodes > 1 and is_loopback(machine.host_addresses[0]):
        text = f"{name!r} resolves to {addresses}: connections by host name from other nodes reach the wrong machine"
        return Check("host name", "warning", f"{text}; FracTorchConfig uses IP addresses and is not affected", line)
    return Check("host name", "ok", f"{name!r} resolves to {addresses}")


def _name_server(machine: MachineInfo) -> list[Check]:
    if not machine.name_server_silent:
        return []
    text = "no answer within a second: torch's store asks it for the name of every peer and serves no rank meanwhile"
    return [Check("name server", "warning", text, "correct /etc/resolv.conf")]


def _own_address(worker: WorkerInfo) -> str:
    """Return an address of the machine that others may reach, if it has one."""
    known = [address for found in worker.network.interfaces.values() for address in found]
    return next((address for address in (worker.node_ip, *known) if not is_loopback(address)), worker.node_ip)


def _interfaces(worker: WorkerInfo, num_nodes: int) -> Check:
    known, text = worker.network.interfaces, _interfaces_text(worker)
    if not known:
        return Check("interfaces", "problem", "no network interface is up", "bring at least the loopback interface up")
    unknown = [name for name in worker.env.get(IFNAME, "").split(",") if name and name not in known]
    if unknown:
        found = f"{IFNAME}={worker.env[IFNAME]} names {unknown[0]!r}, which is none of {', '.join(known)}"
        return Check("interfaces", "problem", found, f"unset {IFNAME}, or name an interface, not a pattern")
    if num_nodes > 1 and is_loopback(worker.node_ip):
        found = f"Ray's address of this node is {worker.node_ip}, which no other node can reach"
        return Check("interfaces", "problem", found, "start Ray there with --node-ip-address=ADDRESS")
    if num_nodes > 1 and owner_of(worker.network.interfaces, worker.node_ip) is None:
        found = f"no interface has the node's address {worker.node_ip} ({text}): a translated address (NAT)"
        return Check("interfaces", "warning", found, "run the container with --network=host: Gloo's ports are random")
    return Check("interfaces", "ok", text)


def _interfaces_text(worker: WorkerInfo) -> str:
    return ", ".join(f"{name} {addresses[0]}" for name, addresses in worker.network.interfaces.items())


def _environment(machine: MachineInfo) -> Check:
    if machine.vgpu_preloaded:
        found = "libvgpu (HAMi) is preloaded; NCCL is reported to crash under it"
        return Check("environment", "warning", found, "FracTorchConfig(on_shared_device='gloo'), or backend='gloo'")
    env = machine.worker.env
    if machine.worker.platform == "win32" and env.get("USE_LIBUV") == "1":
        found = "USE_LIBUV=1, which torch's wheels for Windows do not support"
        return Check("environment", "warning", found, "unset USE_LIBUV; FracTorchConfig overrides it")
    return Check("environment", "ok", ", ".join(f"{name}={value}" for name, value in env.items()) or "nothing is set")


def _shm(machine: MachineInfo) -> list[Check]:
    total, free = machine.shm_total_bytes, machine.shm_free_bytes
    if total is None or free is None:
        return []
    text = f"{_size(free)} free of {_size(total)}"
    fix = "--shm-size=1g or --ipc=host (Docker); an emptyDir with medium: Memory (Kubernetes)"
    users = "NCCL, data loader workers and Ray's object store"
    if free <= _SHM_PROBLEM_BYTES:
        return [Check("/dev/shm", "problem", f"{text}: too little for {users}", fix)]
    if total < _SHM_WARNING_BYTES:
        return [Check("/dev/shm", "warning", f"{text}: little for {users}", fix)]
    return [Check("/dev/shm", "ok", text)]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.0f} MiB"


def _check_devices(machine: MachineInfo) -> tuple[Check, ...]:
    """Check devices and their compute modes, Ray's num_gpus, NCCL, MPS and the ipc backend."""
    worker, missing = machine.worker, machine.not_done
    return (
        *_driver(machine),
        *([] if "CUDA devices" in missing else _devices(machine)),
        *_ray_gpus(machine),
        *([] if "NCCL" in missing else [_nccl(worker), _mps(worker)]),
        *([] if "ipc" in missing else _ipc(worker)),
        *([] if "staged" in missing else _staged(worker)),
    )


def _driver(machine: MachineInfo) -> list[Check]:
    if machine.driver_version is None:
        return []
    cuda = f" for CUDA {machine.driver_cuda}" if machine.driver_cuda else ""
    gpus = ", ".join(counted(machine.driver_gpus)) or "no GPU"
    return [Check("driver", "ok", f"NVIDIA {machine.driver_version}{cuda}: {gpus}")]


def _devices(machine: MachineInfo) -> list[Check]:
    worker = machine.worker
    if worker.devices:
        return [_device(device, worker) for device in worker.devices]
    if not machine.num_node_devices:
        return [Check("CUDA devices", "ok", f"none ({worker.cuda_missing}): {_WITHOUT_DEVICES}")]
    # If the cause contains a fix, the fix follows its last semicolon.
    cause, _, advice = (worker.cuda_missing or "").rpartition("; ")
    text = f"torch uses none of the node's {machine.num_node_devices} GPUs: {cause or advice}"
    if cause:
        return [Check("CUDA devices", "problem", text, advice)]
    if machine.cuda_visible_devices is not None:
        return [Check("CUDA devices", "warning", text, "unset CUDA_VISIBLE_DEVICES, or set it to devices of the node")]
    return [Check("CUDA devices", "problem", text, "install a CUDA build of torch that the driver supports")]


def _device(device: DeviceInfo, worker: WorkerInfo) -> Check:
    text = f"{short_uuid(device.uuid)} {device.name}, {device.total_memory_bytes / 2**30:.1f} GiB"
    if device.is_mig:
        text += f", MIG slice of {short_uuid(device.parent_uuid or 'a GPU')}"
    name, text = f"cuda:{device.index}", f"{text}, compute mode {device.compute_mode}"
    default = "nvidia-smi -c DEFAULT"
    if device.compute_mode == "prohibited":
        return Check(name, "problem", f"{text}: no process may use it", default)
    if device.compute_mode == "exclusive_process" and not worker.mps_reachable:
        return Check(
            name, "warning", f"{text}: workers with a fraction of it fail", f"{default}, or nvidia-cuda-mps-control -d"
        )
    if device.is_mig and (worker.nccl_version or (0, 0, 0)) < NCCL_COMPARES_UUID and worker.nccl_available:
        version = version_text(worker.nccl_version)
        return Check(
            name,
            "warning",
            f"{text}: NCCL {version} counts slices of one GPU as one device and refuses them",
            "NCCL 2.30.7 or newer; until then such ranks use gloo",
        )
    return Check(name, "ok", f"{text}: several workers may share it")


def _ray_gpus(machine: MachineInfo) -> list[Check]:
    unknown = "CUDA devices" in machine.not_done and machine.num_node_devices is None
    return [] if unknown and machine.ray_gpus is not None else [_check_ray_gpus(machine)]


def _check_ray_gpus(machine: MachineInfo) -> Check:
    worker, claimed = machine.worker, machine.ray_gpus
    if claimed is None:
        return Check("Ray's GPUs", "ok", "not checked; with --address num_gpus is compared with the devices")
    if any(device.is_mig for device in worker.devices):
        return Check("Ray's GPUs", "ok", f"{claimed:g} on a node with MIG slices, which are not counted here")
    there = max(worker.num_visible_devices, machine.num_node_devices or 0)
    if claimed > there:
        return Check(
            "Ray's GPUs",
            "problem",
            f"num_gpus={claimed:g} of the node exceeds the GPUs present ({there}): workers get GPUs that do not exist",
            f"start Ray there with --num-gpus={there}, or train with FracTorchConfig(on_missing_cuda='cpu')",
        )
    return Check("Ray's GPUs", "ok", f"{claimed:g} of {there} devices")


def _nccl(worker: WorkerInfo) -> Check:
    if not worker.nccl_available:
        if not worker.devices:
            return Check("NCCL", "ok", "not in this build of torch, and not needed without CUDA devices")
        fix = "" if worker.platform == "win32" else "install a torch build with NCCL"
        return Check("NCCL", "warning", "not in this build of torch: ranks use gloo, also on separate devices", fix)
    if worker.nccl_version is None:
        text = "in this build of torch, but its version cannot be read"
        if not worker.devices:
            return Check("NCCL", "ok", f"{text}, and it is not needed without CUDA devices")
        return Check("NCCL", "warning", text, "set LD_PRELOAD to the library, or reinstall torch")
    can = worker.nccl_version >= NCCL_MULTI_RANK
    shared = "accepts shared devices with on_shared_device='nccl'" if can else "refuses shared devices"
    return Check("NCCL", "ok", f"{version_text(worker.nccl_version)} is loaded; it {shared}")


def _mps(worker: WorkerInfo) -> Check:
    return Check("MPS", "ok", "its control daemon answers" if worker.mps_reachable else "no daemon runs")


def _ipc(worker: WorkerInfo) -> list[Check]:
    if worker.platform != "linux":
        return [Check("ipc", "ok", "the ipc backend needs Linux; it is optional")]
    host = Check("ipc", "ok", "ranks of this machine can share host memory")
    if worker.ipc_host_memory_missing:
        text = f"ranks cannot share host memory: {worker.ipc_host_memory_missing}"
        host = Check("ipc", "warning", text, "fix this, or ignore it: the ipc backend is optional")
    if not worker.devices:
        return [host]
    if worker.ipc_device_memory_missing is None:
        return [
            host,
            Check("ipc", "ok", "ranks on one device can share its memory, as far as one process can check"),
        ]
    text = f"ranks cannot share device memory: {worker.ipc_device_memory_missing}"
    return [
        host,
        Check("ipc", "warning", text, "nothing to do: ranks that share a device use gloo, and ipc stages tensors"),
    ]


def _staged(worker: WorkerInfo) -> list[Check]:
    if worker.staged_missing:
        needed = "on Windows it carries CUDA tensors" if worker.platform == "win32" else "it is optional"
        return [Check("staged", "warning", worker.staged_missing, f"install torch 2.7, or 2.11 or newer; {needed}")]
    return [Check("staged", "ok", "CUDA tensors can be staged through host memory")]
