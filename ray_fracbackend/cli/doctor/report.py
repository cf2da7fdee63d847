"""Report of a machine, lines about it, and the result of the doctor, as frozen dataclasses. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ray_fracbackend.cli.doctor.environment import environment_lines
from ray_fracbackend.cli.doctor.grouping import Block, blocks
from ray_fracbackend.decide.worker_info import WorkerInfo

Level = Literal["ok", "warning", "problem"]
_WIDTH = 120
_COLORS = {"ok": "32", "warning": "33", "problem": "31"}


@dataclass(frozen=True)
class Failure:
    """Why a stage of a machine's report has no values.

    Attributes:
        kind: ``error``, ``crash`` of the process, or ``timeout``.
        text: The error, the signal's name or the exit code, or the seconds of the limit.
        missing: Name of the module that was not found, None for other errors.
    """

    kind: Literal["error", "crash", "timeout"]
    text: str
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """Report of one machine.

    Attributes:
        worker: Report of a worker with all devices of the machine.
        package_version: Version of ray_fracbackend.
        python_version: Such as ``3.11.9``.
        host_addresses: Addresses that the machine's own host name resolves to, IPv4 first.
        host_missing: Why it does not resolve, None if it does.
        host_lookup_s: Seconds of the lookup.
        gloo_interface: Interface on which Gloo was tested, None for that of the host name.
        gloo_device_missing: Why Gloo cannot use it, None if it can.
        shm_total_bytes: Size of /dev/shm, None if there is none.
        shm_free_bytes: Free bytes of it.
        ray_gpus: num_gpus of the node in Ray, None without Ray.
        cuda_visible_devices: The variable CUDA_VISIBLE_DEVICES, None if unset.
        num_node_devices: Number of physical GPUs of the machine as NVML reports it, None if unknown.
        vgpu_preloaded: A GPU-sharing library (HAMi's libvgpu) is preloaded into every process.
        name_server_silent: A lookup of the node's own address got no answer within a second; False on other systems than Linux.
        os_text: System with its version, and libc's.
        torch_built_for: ``CUDA 13.0``, ``ROCm 6.4`` or ``CPU``.
        driver_version: Version of the NVIDIA driver by NVML, None if unknown.
        driver_cuda: Newest CUDA that the driver supports.
        driver_gpus: Names of the GPUs by NVML.
        variables: Environment variables that a report may show.
        failures: Failed stages of child.py, with the reason.
        not_done: Stages without values: failed ones, and those that need one of them.
    """

    worker: WorkerInfo
    package_version: str = ""
    python_version: str = ""
    host_addresses: tuple[str, ...] = ()
    host_missing: str | None = None
    host_lookup_s: float = 0.0
    gloo_interface: str | None = None
    gloo_device_missing: str | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    ray_gpus: float | None = None
    cuda_visible_devices: str | None = None
    num_node_devices: int | None = None
    vgpu_preloaded: bool = False
    name_server_silent: bool = False
    os_text: str = ""
    torch_built_for: str = ""
    driver_version: str | None = None
    driver_cuda: str | None = None
    driver_gpus: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Failure] = field(default_factory=dict)
    not_done: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        name: Subject; stable, for programs.
        level: ``ok``, ``warning`` (training works, but not as well as it could) or ``problem``.
        text: Result of the check.
        fix: What to do, empty if nothing.
    """

    name: str
    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All lines about a machine or a cluster.

    Attributes:
        nodes: Checks by the name of their node.
        cluster: Checks that compare the nodes.
        environment: Versions and devices, for an issue.
        own_values: Values that differ from node to node, as for `grouping.kind_of`, by the name of the node.
    """

    nodes: dict[str, tuple[Check, ...]]
    cluster: tuple[Check, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    own_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Return the lines that are problems, with their node if there are several."""
        several = len(self.nodes) > 1
        return [
            f"{f'{name}: ' if several else ''}{check.name}: {check.text}"
            for name, checks in (*self.nodes.items(), ("between the nodes", self.cluster))
            for check in checks
            if check.level == "problem"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for ``json.dumps``."""
        nodes = [{"node": node, "checks": [asdict(check) for check in checks]} for node, checks in self.nodes.items()]
        cluster = [asdict(check) for check in self.cluster]
        return {"nodes": nodes, "cluster": cluster, "environment": self.environment}

    def to_text(self, color: bool = False) -> str:
        """Format a block of lines for equal nodes, with a fix under each line that needs one, a block for an issue, and a verdict."""
        lines = []
        for block in self._blocks():
            lines.extend(_title(block.nodes))
            for check, nodes in block.lines:
                lines.extend(_lines(check, nodes, color))
        if self.environment:
            lines += ["", "Paste this into an issue:", "", *environment_lines(self.environment)]
        return "\n".join([*lines, "", self._verdict()])

    def _blocks(self) -> list[Block]:
        grouped = blocks(self.nodes, self.own_values)
        if self.cluster:
            grouped.append(Block(("between the nodes",), tuple((check, ()) for check in self.cluster)))
        return grouped

    def _verdict(self) -> str:
        """Return how many problems and warnings there are, and their subjects; one of several nodes counts once."""
        found = [check for block in self._blocks() for check, _ in block.lines]
        counts = []
        for level in ("problem", "warning"):
            names = [check.name for check in found if check.level == level]
            listed = f" ({', '.join(dict.fromkeys(names))})" if names else ""
            counts.append(f"{len(names)} {level}{'' if len(names) == 1 else 's'}{listed}")
        return ", ".join(counts)


def _title(nodes: Sequence[str]) -> list[str]:
    if not nodes:
        return ["several nodes; each line shows names and addresses of its first node"]
    if len(nodes) == 1:
        return [nodes[0]]
    names = textwrap.wrap(", ".join(nodes), _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return [f"{len(nodes)} equal nodes; the lines show names and addresses of the first one", *names]


def _lines(check: Check, nodes: Sequence[str], color: bool) -> list[str]:
    level = f"\x1b[{_COLORS[check.level]}m{check.level:<8}\x1b[0m" if color else f"{check.level:<8}"
    lines = [f"  {level} {check.name:<13} {check.text}"]
    if nodes:
        lines.append(f"{'':25}on:  {', '.join(nodes)}")
    if check.fix:
        lines.append(f"{'':25}fix: {check.fix}")
    return lines
