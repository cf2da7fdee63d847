"""What this worker sits on. Runs on the worker; no process group and no CUDA context is created.

Device identity is the UUID that CUDA itself reports: Ray's GPU ids and ``CUDA_VISIBLE_DEVICES`` are names that two
workers can use for one device, or one name for two. NVML adds what CUDA does not tell without a context.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from ray_fracbackend import ray_compat
from ray_fracbackend.environment import user_environment
from ray_fracbackend.facts import DeviceFacts, NetworkFacts, WorkerFacts
from ray_fracbackend.name_lookups import kept_short, name_server_silent
from ray_fracbackend.nccl_library import loaded_nccl_version
from ray_fracbackend.network import network_facts
from ray_fracbackend.store import hold_store

if sys.platform == "linux":
    from ray_fracbackend.ipc import device_memory_support, host_memory_support

_ENV_PREFIXES = ("NCCL_", "GLOO_", "CUDA_MPS", "USE_LIBUV", "TORCHELASTIC_USE_AGENT_STORE")


def probe_worker(
    rank: int,
    master_addr: str | None = None,
    master_port: int | tuple[int, int] | None = None,
    one_node: bool = False,
) -> WorkerFacts:
    """Collects the facts of the calling worker; rank 0 also opens the store where all will meet.

    Args:
        rank: Its rank in the worker group.
        master_addr: The configured address or name of rank 0's node; a name is resolved here.
        master_port: The configured port of rank 0's store, or an inclusive range.
        one_node: Ray placed all workers on this node.

    Raises:
        PortInUseError: The configured port, or every port of the range, is taken on rank 0's node.
    """
    facts = probe_devices(rank)
    return replace(facts, network=probe_network(facts, master_addr, master_port, one_node))


def probe_network(
    facts: WorkerFacts,
    master_addr: str | None = None,
    master_port: int | tuple[int, int] | None = None,
    one_node: bool = False,
) -> NetworkFacts:
    """The network's part of `probe_worker`, with the store.

    Args:
        facts: The other facts of the calling worker.
        master_addr: As there.
        master_port: As there.
        one_node: As there.
    """
    silent = name_server_silent(facts.node_ip)
    store_port = None
    if facts.rank == 0:
        with kept_short(silent):
            store_port = hold_store(master_port, one_node and master_addr is None)
    return network_facts(facts.boot_id, master_addr, store_port, silent)


def probe_devices(rank: int) -> WorkerFacts:
    """Collects the facts of the calling worker, without those of its network; opens no store.

    Args:
        rank: Its rank in the worker group.
    """
    node_id, node_ip = ray_compat.node_ids()
    resources = ray_compat.assigned_resources()
    wants_gpu = resources.get("GPU", 0) > 0
    devices, cuda_missing = _devices(wants_gpu)
    return _facts(
        devices,
        wants_gpu,
        rank=rank,
        node_id=node_id,
        node_ip=node_ip,
        resources=dict(resources),
        gpu_ids=tuple(map(str, ray_compat.accelerator_ids().get("GPU", []))),
        cuda_missing=cuda_missing,
    )


def probe_machine(node_id: str = "", node_ip: str = "127.0.0.1") -> WorkerFacts:
    """Collects the facts of this machine, as one worker would find them that had all of its devices. Needs no running Ray.

    Args:
        node_id: Ray's id of the node, empty where Ray does not run.
        node_ip: Ray's address of the node.
    """
    found = torch.cuda.is_available()
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if found else []
    return _facts(
        devices,
        True,
        rank=0,
        node_id=node_id,
        node_ip=node_ip,
        cuda_missing=None if found else _why_no_cuda(),
        network=network_facts(boot_id(), name_server_silent=name_server_silent(node_ip)),
    )


def _facts(devices: list[torch.device], ask_nvml: bool, **own: Any) -> WorkerFacts:
    """What any process of the machine finds, and what the caller alone knows."""
    with _nvml() if ask_nvml else nullcontext() as nvml:
        described = tuple(_describe(device.index or 0, nvml) for device in devices)
        num_node_devices = nvml.nvmlDeviceGetCount() if nvml else None
    return WorkerFacts(
        **own,
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        platform=sys.platform,
        torch_version=torch.__version__,
        ray_version=ray.__version__,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=described,
        num_visible_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        num_node_devices=num_node_devices,
        nccl_available=dist.is_nccl_available(),
        nccl_version=loaded_nccl_version(),
        gloo_available=dist.is_gloo_available(),
        mps_reachable=mps_reachable(),
        ipc_host_memory_missing=_no_host_ipc(),
        ipc_device_memory_missing=_no_device_ipc(devices),
        env={name: value for name, value in user_environment().items() if name.startswith(_ENV_PREFIXES)},
    )


def _no_host_ipc() -> str | None:
    if sys.platform == "linux":
        return host_memory_support()
    return "the ipc backend needs Linux"


def _no_device_ipc(devices: list[torch.device]) -> str | None:
    if sys.platform == "linux":
        return device_memory_support(devices[0].index or 0) if devices else "the worker has no CUDA device"
    return "the ipc backend needs Linux"


def boot_id() -> str:
    """The kernel's boot id, the same in all containers of one host; empty where the platform has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _devices(wants_gpu: bool) -> tuple[list[torch.device], str | None]:
    """The worker's CUDA devices, or why there are none although Ray reserved some."""
    if not wants_gpu:
        return [], None
    if not torch.cuda.is_available():
        return [], _why_no_cuda()
    try:
        devices = [device for device in ray_compat.worker_devices() if device.type == "cuda"]
    except (RuntimeError, ValueError) as error:
        return (
            [],
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} does not fit Ray's GPU ids: {error}",
        )
    count = torch.cuda.device_count()
    beyond = [device.index for device in devices if (device.index or 0) >= count]
    if beyond:
        return (
            [],
            f"Ray was told of more GPUs than there are: device {beyond[0]} of {count}; correct num_gpus of the node",
        )
    return devices, None


def _why_no_cuda() -> str:
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} is a CPU-only build"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _nvml() as nvml:
        if nvml is None:
            return f"torch {torch.__version__} finds no NVIDIA driver on the node"
        count = nvml.nvmlDeviceGetCount()
    if count == 0:
        return "the driver finds no GPU on the node"
    return f"CUDA_VISIBLE_DEVICES={visible!r} leaves torch none of the node's {count} GPUs"


def _describe(index: int, nvml: Any) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    bare = str(properties.uuid).removeprefix("GPU-").removeprefix("MIG-")
    uuid, parent, bus_id, mode = f"GPU-{bare}", None, _torch_bus_id(properties), "unknown"
    handle, is_mig = _nvml_handle(nvml, bare)
    if handle is not None:
        if is_mig:
            uuid = f"MIG-{bare}"
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            parent = _text(nvml.nvmlDeviceGetUUID(handle))
        bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        mode = _compute_mode(nvml, handle)
    return DeviceFacts(
        uuid=uuid,
        index=index,
        name=properties.name,
        total_memory_bytes=properties.total_memory,
        pci_bus_id=bus_id,
        parent_uuid=parent,
        compute_mode=mode,
    )


def _torch_bus_id(properties: Any) -> str | None:
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _nvml_handle(nvml: Any, bare_uuid: str) -> tuple[Any, bool]:
    """NVML's handle of the device and whether it is a MIG slice; (None, False) where NVML does not know it."""
    if nvml is None:
        return None, False
    for prefix in ("GPU", "MIG"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"{prefix}-{bare_uuid}".encode()), prefix == "MIG"
        except nvml.NVMLError:
            continue
    return None, False


def _compute_mode(nvml: Any, handle: Any) -> str:
    names = {
        nvml.NVML_COMPUTEMODE_DEFAULT: "default",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    }
    try:
        return names.get(nvml.nvmlDeviceGetComputeMode(handle), "unknown")
    except nvml.NVMLError:
        return "unknown"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextmanager
def _nvml() -> Iterator[Any]:
    """The NVML binding, initialised, or None where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def mps_reachable() -> bool:
    """True where a CUDA MPS control daemon holds its pipe open; the directory alone survives a crash of the daemon."""
    if sys.platform == "win32":
        return False
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    control = os.path.join(directory, "control")
    try:
        if not stat.S_ISFIFO(os.stat(control).st_mode):
            return False
        # ENXIO where nobody reads the pipe; opening it writes nothing.
        os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
