"""Parse names of backends into the backend of each device type. No other module parses such names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Names that this package decides about; any other is left to Ray Train.
OUR_BACKENDS = ("auto", "nccl", "gloo", "ipc", "staged")
# torch's name for a group whose CUDA tensors are staged through host memory. The group is created in Python, so all its
# tensors go through the staged backend, including CPU tensors.
STAGED = "cpu:gloo,cuda:staged"
_RULE = (
    "must be 'auto', 'nccl', 'gloo', 'ipc', 'staged', a pair such as 'cpu:gloo,cuda:nccl', or the name of a backend that is "
    "registered with torch.distributed, without spaces; leave it out to let the start decide"
)
_NO_PART = "must be 'ipc', 'staged' or 'cpu:gloo,cuda:staged': ipc and staged carry tensors of all devices and are part of no other pair"


@dataclass(frozen=True)
class Backends:
    """A name for ``torch.distributed.init_process_group``, and its backend for each device type.

    Attributes:
        name: The name in lower case, as torch reads it; ``auto`` if none was given.
        by_device: Backend by device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``; empty for ``auto``.
    """

    name: str
    by_device: Mapping[str, str]

    @property
    def is_auto(self) -> bool:
        """Whether the start chooses the backend."""
        return self.name == "auto"

    @property
    def is_ours(self) -> bool:
        """Whether this package starts it: our names, and pairs of cpu and cuda with gloo, nccl and staged."""
        if self.name in OUR_BACKENDS:
            return True
        return set(self.by_device) <= {"cpu", "cuda"} and set(self.by_device.values()) <= {"gloo", "nccl", "staged"}

    @property
    def has_nccl(self) -> bool:
        """Whether tensors of some device use NCCL."""
        return "nccl" in self.by_device.values()

    @property
    def has_ipc(self) -> bool:
        """Whether it is the ipc backend."""
        return "ipc" in self.by_device.values()

    @property
    def has_staged(self) -> bool:
        """Whether CUDA tensors use the staged backend."""
        return "staged" in self.by_device.values()

    @property
    def connects_with_gloo(self) -> bool:
        """Whether Gloo connects the ranks when the group is created; ipc and staged contain a Gloo group."""
        return bool({"gloo", "ipc", "staged"} & set(self.by_device.values()))


def parse_backend(name: str | None) -> Backends:
    """Parse the name of a backend.

    Args:
        name: Such as ``nccl``, ``ipc`` or ``cpu:gloo,cuda:nccl``; names are case-insensitive. None and an empty string
            mean ``auto``. A name without a device is used for the device types of that backend: NCCL for cuda, others
            for cpu and cuda.

    Returns:
        The backend of each device type.

    Raises:
        ValueError: The name is invalid; the message is the rule.
    """
    if name is None or name == "":
        name = "auto"
    if not isinstance(name, str) or any(character.isspace() for character in name):
        raise ValueError(_RULE)
    name = name.lower()
    if ":" not in name and "," not in name:
        devices = {"auto": (), "nccl": ("cuda",)}.get(name, ("cpu", "cuda"))
        return Backends(name, dict.fromkeys(devices, name))
    parts = [part.split(":") for part in name.split(",")]
    if not all(len(part) == 2 and all(part) for part in parts):
        raise ValueError(_RULE)
    by_device = dict(parts)
    # torch would create a group of it for all devices, without a message.
    if {"ipc", "staged"} & set(by_device.values()) and by_device != {"cpu": "gloo", "cuda": "staged"}:
        raise ValueError(_NO_PART)
    return Backends(name, by_device)
