"""Versions, devices and settings of machines as a block for an issue, without secrets. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ray_fracbackend.decide.worker_info import version_text

if TYPE_CHECKING:
    from ray_fracbackend.cli.doctor.report import MachineInfo


def environment_of(machine: MachineInfo, nodes: Sequence[MachineInfo] = ()) -> dict[str, Any]:
    """Summarize a machine, and the nodes of its cluster in one line each.

    Args:
        machine: The machine that the command runs on.
        nodes: Nodes of the cluster, empty without one.

    Returns:
        Plain values for ``json.dumps``.
    """
    found: dict[str, Any] = {
        "OS": machine.os_text,
        "Python": machine.python_version,
        "ray_fracbackend": machine.package_version,
        "Ray": machine.worker.ray_version or _unknown(machine, "ray"),
        "torch": machine.worker.torch_version or _unknown(machine, "torch"),
        "torch built for": machine.torch_built_for or "unknown",
        "NVIDIA driver": _driver_text(machine),
        "NCCL": _nccl_text(machine),
        "GPUs": gpu_names(machine) or ("unknown" if {"driver", "CUDA devices"} <= machine.not_done else "none"),
        "variables": dict(machine.variables),
    }
    if nodes:
        found["nodes"] = [_node_text(node) for node in nodes]
    return found


def environment_lines(environment: dict[str, Any]) -> list[str]:
    """Format the block, indented, which Markdown shows as code."""
    width = max(map(len, environment)) + 2
    lines = []
    for name, value in environment.items():
        if isinstance(value, dict):
            value = [f"{key}={text}" for key, text in value.items()]
        texts = value if isinstance(value, list) else [str(value)]
        for index, text in enumerate(texts or ["none"]):
            label = "" if index else f"{name}:"
            lines.append(f"    {label:<{width}}{' '.join(text.split())}")
    return lines


def gpu_names(machine: MachineInfo) -> list[str]:
    """Return the machine's GPUs as torch reports them, else as the driver does: ``2 x NVIDIA H200 (139.8 GiB)``."""
    devices = machine.worker.devices
    if devices:
        return counted(f"{device.name} ({device.total_memory_bytes / 2**30:.1f} GiB)" for device in devices)
    return counted(machine.driver_gpus)


def counted(names: Iterable[str]) -> list[str]:
    """Count equal names: ``2 x NVIDIA H200``."""
    return [f"{number} x {name}" for name, number in Counter(names).items()]


def _unknown(machine: MachineInfo, stage: str) -> str:
    failure = machine.failures.get(stage)
    if failure is None:
        return "unknown"
    return "not installed" if failure.missing == stage else f"cannot be imported ({failure.kind}: {failure.text})"


def _driver_text(machine: MachineInfo) -> str:
    if "driver" in machine.failures:
        return "does not answer"
    if machine.driver_version is None:
        return "unknown" if "driver" in machine.not_done else "none"
    return f"{machine.driver_version} (CUDA {machine.driver_cuda or 'unknown'})"


def _nccl_text(machine: MachineInfo) -> str:
    if "NCCL" in machine.not_done:
        return "unknown"
    return version_text(machine.worker.nccl_version) if machine.worker.nccl_available else "not in this build of torch"


def _node_text(node: MachineInfo) -> str:
    versions = (
        f"ray_fracbackend {node.package_version}, Ray {node.worker.ray_version or 'unknown'}, "
        f"torch {node.worker.torch_version or 'unknown'}, NCCL {_nccl_text(node)}, driver {_driver_text(node)}"
    )
    return f"{node.worker.node_ip}: {versions}, {', '.join(gpu_names(node)) or 'no GPU'}, {node.os_text}"
