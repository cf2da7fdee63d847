"""Collect devices and network of one worker. Runs on the worker; creates no process group and no CUDA context.

Device identity is the UUID that CUDA itself reports: with Ray's GPU ids and ``CUDA_VISIBLE_DEVICES`` two
workers can have two names for one device, or one name for two. NVML adds what CUDA needs a context for; it is optional.
Ray is imported by the functions that need it: the doctor uses the others where Ray cannot be imported.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ray_fracbackend.decide.rendezvous import AGENT_STORE
from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo, may_be_secret
from ray_fracbackend.worker.cuda_driver import driver_facts
from ray_fracbackend.worker.environment import user_environment
from ray_fracbackend.worker.missing_cuda import COMPUTE_MODES, nvml_answer, nvml_session, why_no_cuda
from ray_fracbackend.worker.nccl_library import loaded_nccl_version
from ray_fracbackend.worker.network import network_info
from ray_fracbackend.worker.store import hold_store

_ENV_PREFIXES = ("NCCL_", "GLOO_", "CUDA_MPS", "USE_LIBUV", AGENT_STORE)


def probe_worker(
    rank: int,
    master_addr: str | None = None,
    master_port: int | tuple[int, int] | None = None,
    one_node: bool = False,
    ask_ipc: bool = False,
    port_wait_s: float = 0.0,
) -> WorkerInfo:
    """Collect devices, network and versions of the calling worker; rank 0 also creates the TCPStore of the rendezvous.

    Args:
        rank: Its rank in the worker group.
        master_addr: The configured address or name of rank 0's node; a name is resolved here.
        master_port: The configured port of rank 0's store, or an inclusive range.
        one_node: Ray placed all workers on this node.
        ask_ipc: Whether to check what the ipc backend can use here, which imports and registers it.
        port_wait_s: How long to wait for a configured port that is taken.

    Returns:
        Devices, network and versions of the worker.

    Raises:
        PortInUseError: The configured port, or every port of the range, is taken on rank 0's node.
    """
    info = probe_devices(rank, ask_ipc)
    store_port = hold_store(master_port, one_node and master_addr is None, port_wait_s) if rank == 0 else None
    return replace(info, network=network_info(info.boot_id, master_addr, store_port))


def probe_devices(rank: int, ask_ipc: bool = False) -> WorkerInfo:
    """Collect devices and versions of the calling worker, without its network; create no store.

    Args:
        rank: Its rank in the worker group.
        ask_ipc: As in `probe_worker`.

    Returns:
        Devices and versions of the worker.
    """
    import ray

    from ray_fracbackend import _ray

    node_id, node_ip = _ray.node_ids()
    resources = _ray.assigned_resources()
    wants_gpu = resources.get("GPU", 0) > 0
    devices, cuda_missing = _devices(wants_gpu)
    return _info(
        devices,
        wants_gpu,
        ask_ipc,
        rank=rank,
        node_id=node_id,
        node_ip=node_ip,
        ray_version=ray.__version__,
        resources=dict(resources),
        gpu_ids=tuple(map(str, _ray.accelerator_ids().get("GPU", []))),
        cuda_missing=cuda_missing,
    )


def probe_process(rank: int, device: torch.device | None = None) -> WorkerInfo:
    """Collect the device and versions of the calling process, which no Ray Train started; needs no Ray.

    Args:
        rank: Its rank in the group that is to be made.
        device: The CUDA device that it uses in this group, the current one if None.

    Returns:
        The process as a worker with a whole GPU, on a node with the name of its host; ``cuda_missing`` if there is no such device.
    """
    devices, cuda_missing = [], None
    try:
        # Before it is_available() counts by NVML, which knows nothing of a forked process.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        devices = [device]
    except Exception as error:  # AssertionError, RuntimeError, or DeferredCudaCallError, which is neither
        cuda_missing = why_no_cuda(error)
    return _info(
        devices,
        True,
        rank=rank,
        node_id=boot_id(),
        node_ip=socket.gethostname(),
        resources={"GPU": 1.0},
        # What a start has set here counts for this group too.
        env=os.environ,
        cuda_missing=cuda_missing,
    )


def machine_devices() -> dict[str, Any]:
    """Describe all CUDA devices of this machine as one worker with all of them would; needs no Ray.

    Returns:
        The attributes ``devices``, ``num_visible_devices`` and ``cuda_missing`` of `WorkerInfo`.
    """
    count = 0
    if torch.cuda.is_available():
        # Before it torch counts NVML's GPUs: CUDA has one slice of one, if they are in MIG mode.
        with suppress(Exception):  # said of each device
            torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
    with nvml_session() as nvml:
        described, unreadable = _described([torch.device("cuda", index) for index in range(count)], nvml)
    missing = unreadable if count or unreadable else why_no_cuda()
    return {"devices": described, "num_visible_devices": count, "cuda_missing": missing}


def machine_ipc(devices: tuple[DeviceInfo, ...]) -> dict[str, str | None]:
    """Check what the ipc backend can use on this machine; importing it registers it with torch.distributed.

    Args:
        devices: The machine's CUDA devices.

    Returns:
        The attributes ``ipc_host_memory_missing`` and ``ipc_device_memory_missing`` of `WorkerInfo`.
    """
    return _ipc_support(devices)


def _info(
    devices: list[torch.device],
    ask_nvml: bool,
    ask_ipc: bool = False,
    *,
    env: Mapping[str, str] | None = None,
    **own: Any,
) -> WorkerInfo:
    """Complete the caller's values with those that any process of the machine can collect."""
    with nvml_session() if ask_nvml else nullcontext() as nvml:
        described, unreadable = _described(devices, nvml)
        num_node_devices = nvml_answer(nvml, nvml.nvmlDeviceGetCount) if nvml else None
    own |= {"cuda_missing": unreadable} if unreadable else {}
    own |= _ipc_support(described) if ask_ipc else {}
    # On Windows it takes the place of Gloo wherever the job has devices.
    ask_staged = ask_ipc or (sys.platform == "win32" and bool(devices))
    own |= {"staged_missing": _staged_support()} if ask_staged else {}
    return WorkerInfo(
        **own,
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        platform=sys.platform,
        torch_version=torch.__version__,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=described,
        num_visible_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        num_node_devices=num_node_devices,
        nccl_available=dist.is_nccl_available(),
        nccl_version=loaded_nccl_version(),
        gloo_available=dist.is_gloo_available(),
        mps_reachable=mps_reachable(),
        env={name: value for name, value in (env or user_environment()).items() if _is_shown(name)},
    )


def _is_shown(name: str) -> bool:
    return name.startswith(_ENV_PREFIXES) and not may_be_secret(name)


def _ipc_support(devices: tuple[DeviceInfo, ...]) -> dict[str, str | None]:
    """Check what the ipc backend can use; importing it registers it with torch.distributed."""
    if sys.platform != "linux":
        return dict.fromkeys(("ipc_host_memory_missing", "ipc_device_memory_missing"), "the ipc backend needs Linux")
    from ray_fracbackend.ipc import device_memory_support, host_memory_support

    no_device = "the worker has no CUDA device"
    return {
        "ipc_host_memory_missing": host_memory_support(),
        "ipc_device_memory_missing": device_memory_support(devices[0].index) if devices else no_device,
    }


def _staged_support() -> str | None:
    """Check whether the staged backend can be used; importing it registers it with torch.distributed."""
    from ray_fracbackend.staged import staged_support

    return staged_support()


def boot_id() -> str:
    """Read the kernel's boot id, which all containers of one host have in common.

    Returns:
        The id, empty where the platform has none.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _devices(wants_gpu: bool) -> tuple[list[torch.device], str | None]:
    """Return the worker's CUDA devices, or why there are none although Ray reserved some."""
    if not wants_gpu:
        return [], None
    if not torch.cuda.is_available():
        return [], why_no_cuda()
    from ray_fracbackend import _ray

    try:
        given = _ray.worker_devices()
    except (RuntimeError, ValueError) as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [], f"CUDA_VISIBLE_DEVICES={visible!r} does not fit Ray's GPU ids ({error}); leave the variable to Ray"
    devices = [device for device in given if device.type == "cuda"]
    if not devices:
        says = ", ".join(map(str, given)) or "none"
        return [], (
            f"Ray Train gives this worker no CUDA device (ray.train.torch.get_devices() says {says}), as after an earlier "
            "start on the CPU in its process; start the worker in a new process"
        )
    count = torch.cuda.device_count()
    beyond = [device.index for device in devices if (device.index or 0) >= count]
    if beyond:
        slices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if len(slices) > count and any(name.strip().startswith("MIG-") for name in slices):
            return [], (
                f"Ray Train gives every worker the whole list of {len(slices)} MIG slices, of which CUDA shows a process {count}; "
                "start Ray and the script with TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES=0"
            )
        amd = {name: os.environ[name] for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in os.environ}
        if torch.version.hip is not None and len(set(amd.values())) > 1:
            return [], (
                f"{' and '.join(f'{name}={value!r}' for name, value in amd.items())} mask AMD's devices one after the other, and Ray Train "
                f"counts by one of them: device {beyond[0]} of {count}; unset HIP_VISIBLE_DEVICES for Ray and the script"
            )
        return [], f"num_gpus of the node exceeds the GPUs present: device {beyond[0]} of {count}; correct num_gpus"
    return devices, None


def _described(devices: list[torch.device], nvml: Any) -> tuple[tuple[DeviceInfo, ...], str | None]:
    """Describe all devices, or say why one cannot be used: a GPU may be lost while CUDA still counts it."""
    described = []
    for device in devices:
        index = device.index or 0
        try:
            properties = torch.cuda.get_device_properties(index)
        except Exception as error:  # AssertionError, RuntimeError, or DeferredCudaCallError, which is neither
            return (), f"cuda:{index} cannot be used: {why_no_cuda(error)}"
        described.append(_describe(index, properties, nvml))
    return tuple(described), None


def _describe(index: int, properties: Any, nvml: Any) -> DeviceInfo:
    facts, parent = driver_facts(index), None
    bus_id = (facts.pci_bus_id if facts else None) or _torch_bus_id(properties)
    mode = COMPUTE_MODES.get(facts.compute_mode, "unknown") if facts and facts.compute_mode is not None else "unknown"
    bare = facts.uuid if facts else _bare(properties)
    # Old ROCm builds have no UUID, and some drivers give zeros.
    known = bool(bare.strip("0-"))
    uuid = f"GPU-{bare}" if known else f"BUS-{boot_id() or socket.gethostname()}/{bus_id or index}"
    handle, is_mig = _nvml_handle(nvml, bare) if known else (None, False)
    if known and handle is None and (whole := _gpu_of_slice(bare, properties)) is not None:
        # As with NVML: another rank on the slice may have it.
        uuid, parent = f"MIG-{bare}", whole or None
    if is_mig:
        uuid = f"MIG-{bare}"
        handle = nvml_answer(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        parent = nvml_answer(nvml, nvml.nvmlDeviceGetUUID, handle) if handle is not None else None
    if handle is not None:
        pci = nvml_answer(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        bus_id = os.fsdecode(pci.busId).lower() if pci else bus_id
        mode = COMPUTE_MODES.get(nvml_answer(nvml, nvml.nvmlDeviceGetComputeMode, handle), mode)
    return DeviceInfo(
        uuid=uuid,
        index=index,
        name=properties.name,
        total_memory_bytes=properties.total_memory,
        pci_bus_id=bus_id,
        parent_uuid=parent,
        compute_mode=mode,
    )


def _bare(properties: Any) -> str:
    """Return the UUID of the runtime's properties without its prefix, empty where they have none."""
    return str(getattr(properties, "uuid", None) or "").removeprefix("GPU-").removeprefix("MIG-")


def _gpu_of_slice(bare: str, properties: Any) -> str | None:
    """Return the UUID of a MIG slice's GPU by CUDA alone, empty if unknown; None for what is no slice.

    The name of a slice ends in its profile, such as ``MIG 1g.10gb``; the runtime's properties may have the UUID of its GPU.
    """
    whole = _bare(properties)
    is_other = whole != bare and bool(whole.strip("0-"))
    if is_other or "MIG" in properties.name.split():
        return f"GPU-{whole}" if is_other else ""
    return None


def _torch_bus_id(properties: Any) -> str | None:
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _nvml_handle(nvml: Any, bare_uuid: str) -> tuple[Any, bool]:
    """Return NVML's handle of the device and whether it is a MIG slice; (None, False) where NVML does not know it."""
    if nvml is None:
        return None, False
    for prefix in ("GPU", "MIG"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"{prefix}-{bare_uuid}".encode()), prefix == "MIG"
        except nvml.NVMLError:
            continue
    return None, False


def mps_reachable() -> bool:
    """Look for a CUDA MPS control daemon.

    Returns:
        True where one holds its pipe open; the directory alone survives a crash of the daemon.
    """
    if sys.platform == "win32":
        return False
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    control = os.path.join(directory, "control")
    try:
        if not stat.S_ISFIFO(os.stat(control).st_mode):
            return False
        # ENXIO where no process reads the pipe; opening it writes nothing.
        os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
