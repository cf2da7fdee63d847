"""Texts of public objects for print(), in aligned lines. Imported when an object is printed. Standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ray_fracbackend.decide.addresses import bracketed
from ray_fracbackend.decide.worker_info import NOT_PROBED, ranks_text, version_text

if TYPE_CHECKING:
    from ray_fracbackend.decide.plan import StartPlan
    from ray_fracbackend.decide.rendezvous import Rendezvous
    from ray_fracbackend.decide.worker_info import WorkerInfo

_COLUMNS = 100


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """Return the labels and texts in two columns. A long text continues on the next line; rows without a text are left out."""
    kept = [(label, text) for label, text in rows if text]
    width = max((len(label) for label, _ in kept), default=0) + 2
    wrapper = textwrap.TextWrapper(
        _COLUMNS, subsequent_indent=" " * width, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(f"{label:<{width}}{text}") for label, text in kept)


def plan_text(plan: StartPlan) -> str:
    """Return backend, reason, environment, warnings and hints of a plan, one line each."""
    fallback = "the verification fails" if plan.is_trial else "NCCL refuses ranks that share a GPU"
    device = f"{plan.device_type}, instead of the GPUs that Ray reserved" if plan.train_on_cpu else plan.device_type
    return aligned(
        [
            ("backend", f"{plan.backend} on {device}"),
            ("reason", plan.reason),
            ("fallback", f"{plan.fallback}, if {fallback}" if plan.fallback else ""),
            ("environment", " ".join(f"{name}={value}" for name, value in plan.env_defaults.items())),
            ("rendezvous", plan.rendezvous.reason),
            *(("warning", warning) for warning in (*plan.warnings, *plan.rendezvous.warnings)),
            *(("hint", hint) for hint in plan.hints),
        ]
    )


def rendezvous_text(rendezvous: Rendezvous) -> str:
    """Return the addresses, ranks and warnings of a rendezvous, one line each."""
    ranks_by_address: dict[str, list[int]] = {}
    for rank, address in enumerate(rendezvous.master_addrs):
        ranks_by_address.setdefault(address, []).append(rank)
    others = {address: ranks for address, ranks in ranks_by_address.items() if address != rendezvous.master_addr}
    size = len(rendezvous.master_addrs)
    return aligned(
        [
            (
                "rendezvous",
                rendezvous.reason or f"rank 0 at {bracketed(rendezvous.master_addr)}:{rendezvous.master_port}",
            ),
            *(("address", f"{address} from {ranks_text(ranks)}") for address, ranks in others.items()),
            ("init_method", rendezvous.init_method),
            ("ranks", f"{size} on {'one node' if rendezvous.one_node else 'several nodes'}" if size > 1 else "1"),
            *(("warning", warning) for warning in rendezvous.warnings),
        ]
    )


def worker_text(worker: WorkerInfo) -> str:
    """Return devices, versions, backends and network of a worker, one line each."""
    missing = {
        "Gloo": worker.network.gloo_missing if worker.gloo_available else "torch was built without it",
        "NCCL": None if worker.nccl_available else "torch was built without it",
        "ipc, host memory": worker.ipc_host_memory_missing,
        "ipc, device memory": worker.ipc_device_memory_missing,
        "staged": worker.staged_missing,
    }
    version = {"NCCL": version_text(worker.nccl_version)}
    interfaces = (f"{name} {', '.join(addresses)}" for name, addresses in worker.network.interfaces.items())
    return aligned(
        [
            (
                f"rank {worker.rank}",
                f"node {worker.node_ip}, host {worker.hostname}, pid {worker.pid}, {worker.platform}",
            ),
            ("versions", f"torch {worker.torch_version or 'unknown'}, Ray {worker.ray_version or 'unknown'}"),
            ("reserved", ", ".join(f"{amount:g} {name}" for name, amount in worker.resources.items())),
            *(("device", str(device)) for device in worker.devices),
            ("device", "" if worker.devices else f"none: {worker.cuda_missing}" if worker.cuda_missing else "none"),
            *(
                (name, f"no: {why}" if why else version.get(name, "yes"))
                for name, why in missing.items()
                if why != NOT_PROBED
            ),
            ("MPS", "yes" if worker.mps_reachable else ""),
            ("network", "; ".join(interfaces)),
            ("environment", " ".join(f"{name}={value}" for name, value in worker.env.items())),
        ]
    )
