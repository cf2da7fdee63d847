"""Query the CUDA driver about a visible device, without a CUDA context. Linux, standard library only.

Only the driver always knows the device's own identity: for a MIG slice, torch's properties may contain the UUID of its GPU.

Source: CUDA driver API, "Device Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from uuid import UUID

_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
# CUcomputemode and nvmlComputeMode_t, without the mode for one thread at a time, which drivers no longer have.
COMPUTE_MODES: Mapping[int | None, str] = {0: "default", 2: "prohibited", 3: "exclusive_process"}
_BUS_ID_CHARS = 32


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """Properties of one device, as reported by the driver.

    Attributes:
        uuid: UUID without a prefix; for a MIG slice that of the slice.
        pci_bus_id: Such as ``00000000:1b:00.0``, lower case; for a MIG slice that of its GPU. None if the driver does
            not report it.
        compute_mode: Number of ``CUcomputemode``, None if the driver does not report it.
    """

    uuid: str
    pci_bus_id: str | None = None
    compute_mode: int | None = None


def driver_facts(index: int) -> DriverFacts | None:
    """Query the driver about a device.

    Args:
        index: torch's index of the device in this process.

    Returns:
        The properties; None if there is no NVIDIA driver, as on ROCm and on Windows, or if a query fails.
    """
    library = _library()
    device = ctypes.c_int()
    if library is None or library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), index):
        return None
    raw = (ctypes.c_ubyte * 16)()
    if library.cuDeviceGetUuid_v2(raw, device):  # the first version returns the UUID of the GPU for a slice
        return None
    bus_id, mode = ctypes.create_string_buffer(_BUS_ID_CHARS), ctypes.c_int()
    has_bus_id = not library.cuDeviceGetPCIBusId(bus_id, _BUS_ID_CHARS, device)
    has_mode = not library.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, device)
    return DriverFacts(
        uuid=str(UUID(bytes=bytes(raw))),
        # NVML prints eight digits of the domain, CUDA four.
        pci_bus_id=bus_id.value.decode().lower().rjust(len("00000000:1b:00.0"), "0") if has_bus_id else None,
        compute_mode=mode.value if has_mode else None,
    )


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
