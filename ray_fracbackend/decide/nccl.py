"""NCCL's rules for ranks on one GPU: versions, duplicate-GPU errors, the multi-rank flags of 2.30, error explanations.

NCCL writes the reason as a warning to its log and returns ``ncclInvalidUsage`` alone; torch appends that sentence as
"Last error" where it can. Sources: init.cc, transport/nvls.cc, utils.cc and env.rst of the release tags.

===================  ==============================================================================
NCCL                 error text
===================  ==============================================================================
to 2.29              ``Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000``
2.30.3, 2.30.4       ``Multiple ranks detected using the same GPU on this node. Set NCCL_MULTI_...``
2.30.7 and newer     ``Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_...``
2.30, NVLS demanded  ``... has been set to "1" and communicator has multiple ranks using the same NVML device``
===================  ==============================================================================

Several ranks on one GPU are experimental in NCCL, since 2.30: every rank takes channels of its own, and too few resources for
all of them end in a hang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ray_fracbackend.decide.device_sharing import ShareGroup, different_devices, share_text, sharing_ranks
from ray_fracbackend.decide.interfaces import NCCL_IFNAME, nccl_doubt
from ray_fracbackend.decide.worker_info import DeviceInfo, NcclVersion, WorkerInfo, ranks_text, version_text
from ray_fracbackend.errors import FracBackendError, SharedDeviceError, StartTimeoutError, VerificationError

if TYPE_CHECKING:
    from ray_fracbackend.decide.plan import StartPlan

# From this version on NCCL compares GPU UUIDs instead of PCI bus ids (init.cc, ncclCheckMultiRank).
NCCL_COMPARES_UUID: NcclVersion = (2, 30, 7)
# From this version on NCCL takes several ranks on one GPU when NCCL_MULTI_RANK_GPU_ENABLE=1.
NCCL_MULTI_RANK: NcclVersion = (2, 30, 0)
MULTI_RANK_ENV = "NCCL_MULTI_RANK_GPU_ENABLE"
# CTAs for all ranks of a device together: NCCL documents its defaults as enough for two ranks.
_CTAS_PER_DEVICE = 8

_REFUSALS = re.compile(
    r"Duplicate GPU detected(?:\s*:\s*rank \d+ and rank \d+ both on CUDA device \w+)?"
    r"|Multiple ranks (?:detected|are) using the same GPU[^.\n;)]*"
    r"|NCCL_NVLS_ENABLE has been set to \"1\" and communicator has multiple ranks[^.\n;)]*",
    re.IGNORECASE,
)
_OWN_FAILURES = re.compile(r"^nccl(?:UnhandledCudaError|SystemError|InternalError|InvalidArgument):", re.MULTILINE)
_RANKS = re.compile(r"Duplicate GPU detected\s*:\s*rank (\d+) and rank (\d+)", re.IGNORECASE)
_LAST_ERROR = re.compile(r"^Last error:\s*\n\s*(\S[^\n]*)", re.MULTILINE)


def versions_text(workers: Sequence[WorkerInfo]) -> str:
    """Format the NCCL versions of the workers in ascending order, such as ``2.28.9`` or ``2.27.3 and 2.28.9``."""
    found = sorted({worker.nccl_version or (0, 0, 0) for worker in workers})
    return " and ".join(version_text(version if version[0] else None) for version in found)


def nccl_conflicts(workers: Sequence[WorkerInfo]) -> tuple[ShareGroup, ...]:
    """Group ranks on different devices that the loaded NCCL considers one and refuses.

    NCCL compares ranks of equal host hash only (utils.cc): below 2.30.7 by PCI bus id, so that MIG slices of one GPU
    collide, from 2.30.7 on by device UUID. A version that could not be read is taken to be old.
    """
    return different_devices(
        workers, lambda worker, device: f"{worker.nccl_host}\0{_compared(worker.nccl_version, device)}"
    )


def _compared(version: NcclVersion | None, device: DeviceInfo) -> str:
    if version is not None and version >= NCCL_COMPARES_UUID:
        return device.uuid
    return device.pci_bus_id or device.parent_uuid or device.uuid


def mig_siblings(workers: Sequence[WorkerInfo]) -> tuple[ShareGroup, ...]:
    """Group ranks on different MIG slices of one GPU; users report that NCCL may refuse these at any version."""
    if not any(worker.devices and worker.devices[0].is_mig for worker in workers):
        return ()
    return different_devices(workers, _physical_gpu)


def _physical_gpu(worker: WorkerInfo, device: DeviceInfo) -> str:
    if device.is_mig and device.parent_uuid is None and device.pci_bus_id:  # NVML did not name the parent
        return f"{worker.nccl_host}\0{device.pci_bus_id}"
    return device.parent_uuid or device.uuid


def multi_rank_obstacle(workers: Sequence[WorkerInfo], groups: Sequence[ShareGroup]) -> str | None:
    """Return why the user's ``NCCL_MULTI_RANK_GPU_ENABLE=1`` has no effect, None where it has.

    It needs the variable on all ranks that share a device, and one NCCL of 2.30 or newer on all workers.

    Args:
        workers: Every rank, in rank order.
        groups: The ranks that share a device.

    Returns:
        The obstacle in one clause.
    """
    missing = [rank for rank in sharing_ranks(groups) if workers[rank].env.get(MULTI_RANK_ENV) != "1"]
    if missing:
        return f"it is not set on {ranks_text(missing)}"
    if demanded := nvls_demanded(workers):
        return demanded
    versions = {worker.nccl_version if worker.nccl_available else None for worker in workers}
    if len(versions) > 1 or None in versions:
        return "the workers do not all have one version of NCCL"
    if min(version for version in versions if version) < NCCL_MULTI_RANK:
        return f"NCCL {versions_text(workers)} is older than 2.30"
    return None


def nvls_demanded(workers: Sequence[WorkerInfo]) -> str | None:
    """Return who demands NVLS, in one clause: NCCL refuses it beside several ranks on a GPU. None where nobody does."""
    ranks = [worker.rank for worker in workers if worker.env.get("NCCL_NVLS_ENABLE") == "1"]
    return (
        f"NCCL_NVLS_ENABLE=1 is set on {ranks_text(ranks)}, which NCCL refuses beside several ranks on one GPU"
        if ranks
        else None
    )


def refusal_in(text: str) -> str | None:
    """Find NCCL's duplicate-GPU error in exception text; None where there is none."""
    found = _REFUSALS.search(text)
    return found.group().strip() if found else None


def refused_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of the communicator that the error names, in ascending order; newer versions name none."""
    found = _RANKS.search(text)
    return tuple(sorted(map(int, found.groups()))) if found else ()


def is_invalid_usage(text: str) -> bool:
    """Return True where NCCL returned ``ncclInvalidUsage``, with or without a reason."""
    return "ncclInvalidUsage" in text or ("NCCL" in text and "invalid usage" in text)


def is_own_failure(text: str) -> bool:
    """Return True where NCCL failed on the rank itself and not for the loss of a peer, which is ``ncclRemoteError``."""
    return _OWN_FAILURES.search(text) is not None and "Call to connect" not in text


def is_out_of_memory(text: str) -> bool:
    """Return True where NCCL found no room on the device for its communicator or a buffer."""
    return "ncclUnhandledCudaError" in text and "out of memory" in text.lower()


def is_timeout(text: str) -> bool:
    """Return True for torch's error of a wait for NCCL that has ended at its limit; it names the group's timeout, not the limit."""
    return "Watchdog caught collective operation timeout" in text


def cause_of(error: BaseException) -> str:
    """Summarize an error in one line: its first, and NCCL's own last error where torch appended that."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    last = _LAST_ERROR.search(text)
    first = text.splitlines()[0]
    return f"{first}: {last.group(1).strip()}" if last else first


def multi_rank_env(num_ranks: int, several_nodes: bool = False) -> dict[str, str]:
    """Return the variables that NCCL 2.30 or newer needs for several ranks on one GPU.

    NVLS is disabled explicitly: it is incompatible with several ranks per GPU, and 2.30.7 detects that from the last
    pair of ranks alone (init.cc, ``hasMultiRankNvml``).

    Args:
        num_ranks: Ranks on the fullest GPU, at least one.
        several_nodes: True if the job has more than one node.
    """
    env = {MULTI_RANK_ENV: "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": str(max(1, _CTAS_PER_DEVICE // num_ranks))}
    if several_nodes:
        env["NCCL_NET_GDR_LEVEL"] = "LOC"
    return env


def kept_settings(workers: Sequence[WorkerInfo], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return ``NAME=value`` of each variable that the user set to another value than the plan."""
    return tuple(
        sorted({f"{name}={w.env[name]}" for w in workers for name in env if w.env.get(name, env[name]) != env[name]})
    )


def interface_doubts(workers: Sequence[WorkerInfo]) -> tuple[str, ...]:
    """Return each ``NCCL_SOCKET_IFNAME`` by which NCCL finds no interface of the rank's node, in one line with the ranks."""
    ranks_of: dict[str, list[int]] = {}
    for worker in workers:
        value, known = worker.env.get(NCCL_IFNAME, ""), list(worker.network.interfaces)
        if known and (doubt := nccl_doubt(value, known)) is not None:
            ranks_of.setdefault(f"{NCCL_IFNAME}={value} is kept, but {doubt}", []).append(worker.rank)
    return tuple(f"{ranks_text(ranks)}: {doubt}" for doubt, ranks in ranks_of.items())


def explain_failure(error: FracBackendError, plan: StartPlan, workers: Sequence[WorkerInfo]) -> FracBackendError:
    """Explain a failed start of NCCL from what all ranks reported; the error itself where that adds nothing.

    Args:
        error: The error of the start.
        plan: The plan that was tried.
        workers: Every rank, in rank order.

    Returns:
        SharedDeviceError where NCCL refused ranks on one GPU. With several ranks per GPU, a timeout or a failed
        verification of the same class, with the usual cause.
    """
    if not plan.backends.has_nccl:
        return error
    sentence = refusal_in(str(error))
    doubts = interface_doubts(workers) if isinstance(error, (StartTimeoutError, VerificationError)) else ()
    if sentence is None and doubts:  # which NCCL calls an invalid usage too
        return type(error)(f"{error} {'; '.join(doubts)}.", ranks=error.ranks)
    if sentence is None and is_invalid_usage(str(error)) and plan.share_groups:
        sentence = "ncclInvalidUsage"
    if sentence is not None:
        return _refused(sentence, error, plan, workers)
    hangs = isinstance(error, StartTimeoutError) or (
        isinstance(error, VerificationError) and "no answer within" in str(error)
    )
    if plan.share_groups and hangs:
        advice = (
            "NCCL hangs where one GPU has too few resources for all of its ranks: set NCCL_MAX_CTAS lower, put fewer ranks "
            f"on the GPU, run the MPS daemon{_or_gloo(workers)}."
        )
        return type(error)(f"{error} {advice}", ranks=error.ranks)
    return error


def _refused(
    sentence: str, error: FracBackendError, plan: StartPlan, workers: Sequence[WorkerInfo]
) -> SharedDeviceError:
    groups = plan.share_groups or mig_siblings(workers)
    who = (
        share_text(groups)
        if groups
        else f"{ranks_text(error.ranks)} share a GPU"
        if error.ranks
        else "ranks share a GPU"
    )
    ranks = sharing_ranks(groups) or error.ranks
    return SharedDeviceError(
        f"NCCL {versions_text(workers)} refused the start: {who} ({sentence}). {_advice(plan, workers)}",
        ranks=ranks,
    )


def _advice(plan: StartPlan, workers: Sequence[WorkerInfo]) -> str:
    kept = kept_settings(workers, plan.env_defaults)
    if kept:
        return f"The user set {', '.join(kept)}, which was kept: unset it{_or_gloo(workers)}."
    if plan.env_defaults:
        return f"NCCL's flags for several ranks per GPU did not help: give every worker a GPU of its own{_or_gloo(workers)}."
    return f"Give every worker a GPU of its own{_or_gloo(workers)}."


def _or_gloo(workers: Sequence[WorkerInfo]) -> str:
    """Return the advice to use Gloo, where it can be used."""
    can = all(worker.gloo_available and worker.network.gloo_missing is None for worker in workers)
    return ", or use backend='gloo'" if can else ""
