"""Can device memory be shared between processes here? Imports stdlib and torch; makes no CUDA context."""

from __future__ import annotations

import platform
import sys

import torch

from ..host.support import host_memory_support
from .driver import DriverError, shares_events


def device_memory_support(device_index: int = 0) -> str | None:
    """Whether the ipc backend can use the memory of a CUDA device between processes of this machine.

    Needs no process group. What only several processes can find out (a MIG slice, a container without the host's
    process ids) is found out when a group is set up, which falls back to Gloo.

    Args:
        device_index: torch's index of the device in this process.

    Returns:
        None if it can, as far as one process can tell, else the reason in one sentence.
    """
    if sys.platform != "linux":
        return f"CUDA memory is shared between processes on Linux only, and this is {sys.platform}"
    reason = host_memory_support()
    if reason is not None:
        return reason
    release = platform.release().lower()
    if "microsoft" in release:
        return "this is Windows Subsystem for Linux, where CUDA memory cannot be shared between processes"
    if "tegra" in release:
        return "this is a Tegra, where CUDA memory cannot be shared between processes"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not 0 <= device_index < torch.cuda.device_count():
        return f"there is no device {device_index} among the {torch.cuda.device_count()} that torch sees"
    try:
        if not shares_events(device_index):
            return f"device {device_index} cannot share events between processes"
    except DriverError as error:
        return str(error)
    return None
