"""Values of the doctor: what a machine is, one line about it, and all lines with their text and JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ray_fracbackend.facts import WorkerFacts

Level = Literal["ok", "warning", "problem"]
_COLORS = {"ok": "32", "warning": "33", "problem": "31"}


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """One machine as the doctor sees it.

    Attributes:
        worker: What a worker would find there that had all of its devices.
        package_version: Version of ray_fracbackend.
        python_version: Such as ``3.11.9``.
        host_addresses: What the machine's own host name resolves to, IPv4 first.
        host_missing: Why it does not resolve, None where it does.
        host_lookup_s: Seconds that the look-up took.
        gloo_interface: Interface on which Gloo was tried, None for the one of the host name.
        gloo_device_missing: Why Gloo cannot use it, None where it can.
        shm_total_bytes: Size of /dev/shm, None where there is none.
        shm_free_bytes: What of it is free.
        ray_gpus: GPUs that Ray gives out on this node, None where no Ray was asked.
        vgpu_preloaded: A GPU-sharing library (HAMi's libvgpu) is preloaded into every process.
    """

    worker: WorkerFacts
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
    vgpu_preloaded: bool = False


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        name: What was looked at; stable, for machines.
        level: ``ok``, ``warning`` (training works, not as well as it could) or ``problem``.
        text: What was found.
        fix: What to do about it, empty where all is well.
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
        cluster: Checks of the nodes against each other.
    """

    nodes: dict[str, tuple[Check, ...]]
    cluster: tuple[Check, ...] = ()

    @property
    def ok(self) -> bool:
        """True where no line is a problem."""
        return not any(check.level == "problem" for _, checks in self._parts() for check in checks)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that ``json.dumps`` takes."""
        nodes = [{"node": node, "checks": [asdict(check) for check in checks]} for node, checks in self.nodes.items()]
        return {"ok": self.ok, "nodes": nodes, "cluster": [asdict(check) for check in self.cluster]}

    def to_text(self, color: bool = False) -> str:
        """A block of lines for each node, a fix under each line that needs one."""
        lines = []
        for name, checks in self._parts():
            lines.append(name)
            for check in checks:
                level = f"\x1b[{_COLORS[check.level]}m{check.level:<8}\x1b[0m" if color else f"{check.level:<8}"
                lines.append(f"  {level} {check.name:<13} {check.text}")
                if check.fix:
                    lines.append(f"{'':25}fix: {check.fix}")
        return "\n".join(lines)

    def _parts(self) -> Iterable[tuple[str, tuple[Check, ...]]]:
        yield from self.nodes.items()
        if self.cluster:
            yield "between the nodes", self.cluster
