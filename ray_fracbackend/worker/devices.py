"""Find and describe the worker's own CUDA devices. Creates no CUDA context.

A device is identified by the UUID that CUDA reports. With Ray's GPU ids and ``CUDA_VISIBLE_DEVICES`` two workers can
have two names for one device, or one name for two devices. NVML adds details for which CUDA would need a context; it is
optional.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ray_fracbackend.decide.worker_info import DeviceInfo
from ray_fracbackend.worker.cuda_driver import driver_facts
from ray_fracbackend.worker.missing_cuda import COMPUTE_MODES, nvml_answer, nvml_session, why_no_cuda


def worker_devices(wants_gpu: bool) -> tuple[list[torch.device], str | None]:
    """Return the worker's CUDA devices, or the reason why it has none although Ray reserved some.

    Args:
        wants_gpu: Whether Ray reserved GPUs for the worker.
    """
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
        returned = ", ".join(map(str, given)) or "none"
        return [], (
            f"Ray Train assigned this worker no CUDA device (ray.train.torch.get_devices() returned {returned}), for example after "
            "an earlier start on the CPU in its process; start the worker in a new process"
        )
    count = torch.cuda.device_count()
    beyond = [device.index for device in devices if (device.index or 0) >= count]
    if beyond:
        slices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if len(slices) > count and any(name.strip().startswith("MIG-") for name in slices):
            return [], (
                f"Ray Train passes every worker the whole list of {len(slices)} MIG slices, and CUDA shows a process only {count} of them; "
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


def described(devices: list[torch.device], nvml: Any) -> tuple[tuple[DeviceInfo, ...], str | None]:
    """Describe all devices, or return why one cannot be used: a GPU may be lost while CUDA still counts it.

    Args:
        devices: torch's devices.
        nvml: The module from `nvml_session`, None without NVML.
    """
    found = []
    for device in devices:
        index = device.index or 0
        try:
            properties = torch.cuda.get_device_properties(index)
        except Exception as error:  # AssertionError, RuntimeError, or DeferredCudaCallError, which is neither
            return (), f"cuda:{index} cannot be used: {why_no_cuda(error)}"
        found.append(_describe(index, properties, nvml))
    return tuple(found), None


def _describe(index: int, properties: Any, nvml: Any) -> DeviceInfo:
    facts, parent = driver_facts(index), None
    bus_id = (facts.pci_bus_id if facts else None) or _torch_bus_id(properties)
    mode = COMPUTE_MODES.get(facts.compute_mode, "unknown") if facts and facts.compute_mode is not None else "unknown"
    bare = facts.uuid if facts else _bare(properties)
    # Old ROCm builds have no UUID, and some drivers return zeros.
    known = bool(bare.strip("0-"))
    uuid = f"GPU-{bare}" if known else f"BUS-{boot_id() or socket.gethostname()}/{bus_id or index}"
    handle, is_mig = _nvml_handle(nvml, bare) if known else (None, False)
    if known and handle is None and (whole := _gpu_of_slice(bare, properties)) is not None:
        # Same prefix as with NVML, because another rank on the slice may use NVML.
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
    """Return the UUID of the runtime's properties without its prefix, empty if they have none."""
    return str(getattr(properties, "uuid", None) or "").removeprefix("GPU-").removeprefix("MIG-")


def _gpu_of_slice(bare: str, properties: Any) -> str | None:
    """Return the UUID of a MIG slice's GPU as CUDA reports it, empty if unknown; None if the device is not a slice.

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
    """Return NVML's handle of the device and whether it is a MIG slice; (None, False) if NVML does not find it."""
    if nvml is None:
        return None, False
    for prefix in ("GPU", "MIG"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"{prefix}-{bare_uuid}".encode()), prefix == "MIG"
        except nvml.NVMLError:
            continue
    return None, False


def machine_devices() -> dict[str, Any]:
    """Describe all CUDA devices of this machine, as a worker with all of them would; needs no Ray.

    Returns:
        The attributes ``devices``, ``num_visible_devices`` and ``cuda_missing`` of `WorkerInfo`.
    """
    count = 0
    if torch.cuda.is_available():
        # Before CUDA is initialized torch counts NVML's GPUs. If they are in MIG mode, CUDA shows one slice of one GPU.
        with suppress(Exception):  # reported for each device below
            torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
    with nvml_session() as nvml:
        known, unreadable = described([torch.device("cuda", index) for index in range(count)], nvml)
    missing = unreadable if count or unreadable else why_no_cuda()
    return {"devices": known, "num_visible_devices": count, "cuda_missing": missing}


def boot_id() -> str:
    """Read the kernel's boot id, which is the same in all containers of one host.

    Returns:
        The id, empty if the platform has none.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def mps_reachable() -> bool:
    """Check for a running CUDA MPS control daemon.

    Returns:
        True if a daemon has its pipe open. The directory may exist without one: it survives a crash of the daemon.
    """
    if sys.platform == "win32":
        return False
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    control = os.path.join(directory, "control")
    try:
        if not stat.S_ISFIFO(os.stat(control).st_mode):
            return False
        # Raises ENXIO if no process reads the pipe; opening it writes nothing.
        os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
