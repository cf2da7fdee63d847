"""Find and describe the worker's own CUDA devices. Creates no CUDA context.

A device is identified by the UUID that CUDA's driver reports. With Ray's GPU ids and ``CUDA_VISIBLE_DEVICES`` two workers
can have two names for one device, or one name for two devices.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import torch

from ray_fracbackend.decide.worker_info import DeviceInfo
from ray_fracbackend.worker.cuda_driver import COMPUTE_MODES, DriverFacts, driver_facts


def worker_devices(wants_gpu: bool) -> tuple[list[torch.device], str | None]:
    """Return the worker's CUDA devices, or the reason why it has none although Ray reserved some.

    Args:
        wants_gpu: Whether Ray reserved GPUs for the worker.
    """
    if not wants_gpu:
        return [], None
    if not torch.cuda.is_available():
        from ray_fracbackend.worker.missing_cuda import why_no_cuda  # not imported on the good path

        return [], why_no_cuda()
    from ray_fracbackend import _ray

    try:
        given = _ray.worker_devices()
    except (RuntimeError, ValueError) as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [], f"CUDA_VISIBLE_DEVICES={visible!r} does not fit Ray's GPU ids ({error}); leave the variable to Ray"
    devices = [device for device in given if device.type == "cuda"]
    if not devices:
        return [], (
            "Ray Train assigned this worker no CUDA device, for example after an earlier start on the CPU in its process; start the "
            "worker in a new process"
        )
    count = torch.cuda.device_count()
    if beyond := [device.index for device in devices if (device.index or 0) >= count]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [], (
            f"num_gpus of the node exceeds the GPUs present: device {beyond[0]} of {count}, CUDA_VISIBLE_DEVICES={visible!r}; correct "
            "num_gpus, or with a list of MIG slices start Ray and the script with TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES=0"
        )
    return devices, None


def described(devices: list[torch.device]) -> tuple[tuple[DeviceInfo, ...], str | None]:
    """Describe all devices, or return why one cannot be used: a GPU may be lost while CUDA still counts it."""
    found = []
    for device in devices:
        index = device.index or 0
        try:
            properties = torch.cuda.get_device_properties(index)
        except Exception as error:  # AssertionError, RuntimeError, or DeferredCudaCallError, which is neither
            from ray_fracbackend.worker.missing_cuda import why_no_cuda

            return (), f"cuda:{index} cannot be used: {why_no_cuda(error)}"
        found.append(_describe(index, properties))
    return tuple(found), None


def _describe(index: int, properties: Any) -> DeviceInfo:
    of_torch = str(getattr(properties, "uuid", None) or "").removeprefix("GPU-").removeprefix("MIG-")
    facts = driver_facts(index) or DriverFacts(uuid=of_torch)
    bus_id = facts.pci_bus_id
    if bus_id is None and hasattr(properties, "pci_bus_id"):
        bus_id = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    # The name of a MIG slice ends in its profile, such as MIG 1g.10gb; torch's properties may have the UUID of its GPU.
    has_parent = of_torch != facts.uuid and bool(of_torch.strip("0-"))
    prefix = "MIG" if has_parent or "MIG" in properties.name.split() else "GPU"
    # Old ROCm builds have no UUID, and some drivers return zeros.
    is_known = bool(facts.uuid.strip("0-"))
    return DeviceInfo(
        uuid=f"{prefix}-{facts.uuid}" if is_known else f"BUS-{boot_id() or socket.gethostname()}/{bus_id or index}",
        index=index,
        name=properties.name,
        total_memory_bytes=properties.total_memory,
        pci_bus_id=bus_id,
        parent_uuid=f"GPU-{of_torch}" if is_known and has_parent else None,
        compute_mode=COMPUTE_MODES.get(facts.compute_mode, "unknown"),
    )


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
