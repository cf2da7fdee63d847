"""Add information from the plan and all workers to the error of a failed start. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ray_fracbackend.decide.addresses import is_link_local, is_loopback, normal, owner_of
from ray_fracbackend.decide.advice import advise
from ray_fracbackend.decide.device_sharing import share_text, sharing_ranks
from ray_fracbackend.decide.nccl import interface_doubts, kept_settings, mig_siblings, versions_text
from ray_fracbackend.decide.plan import Decision
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text
from ray_fracbackend.errors import (
    FracBackendError,
    SharedDeviceError,
    StartTimeoutError,
    UnreachableMasterError,
    VerificationError,
)


def explained(
    error: FracBackendError, decision: Decision, workers: Sequence[WorkerInfo], master_addr: str
) -> FracBackendError:
    """Return the error with information from the plan and the workers; unchanged if there is none.

    Args:
        error: The error of the start.
        decision: The decision that was tried.
        workers: Every rank, in rank order.
        master_addr: The address of rank 0's store that was tried.

    Returns:
        SharedDeviceError if NCCL refused ranks on one GPU, else an error of the same class.
    """
    if isinstance(error, UnreachableMasterError):
        return explain_unreachable(error, workers, master_addr)
    return explain_nccl(error, decision, workers)


def explain_nccl(error: FracBackendError, decision: Decision, workers: Sequence[WorkerInfo]) -> FracBackendError:
    """Explain a failed start of NCCL, as in `explained`; an error of another backend is returned unchanged."""
    if not decision.backends.has_nccl:
        return error
    if error.kind == "refused":
        return _refused(error, error.cause, decision, workers)
    doubts = interface_doubts(workers) if isinstance(error, (StartTimeoutError, VerificationError)) else ()
    if doubts:  # NCCL calls this an invalid usage too
        return error.restated(f"{error} {'; '.join(doubts)}.")
    if error.kind == "invalid_usage" and decision.share_groups:
        return _refused(error, "ncclInvalidUsage", decision, workers)
    stalled = isinstance(error, VerificationError) and error.kind == "stalled"
    if decision.share_groups and (stalled or isinstance(error, StartTimeoutError)):
        return error.restated(f"{error} {advise('several ranks hang', has_gloo=_has_gloo(workers))}")
    return error


def explain_unreachable(
    error: UnreachableMasterError, workers: Sequence[WorkerInfo], master_addr: str
) -> UnreachableMasterError:
    """Explain why a rank did not reach rank 0, by the source of rank 0's address, as in `explained`."""
    first = workers[0]
    if normal(master_addr) != normal(first.node_ip):
        return error
    interfaces = first.network.interfaces
    own = owner_of(interfaces, master_addr)
    found = f" Ray's address of rank 0's node is {master_addr}{f' (interface {own})' if own else ''}"
    twins = [w.rank for w in workers if w.node_ip == first.node_ip and w.network.network_id != first.network.network_id]
    others = {
        name: [address for address in addresses if not is_loopback(address) and not is_link_local(address)]
        for name, addresses in interfaces.items()
        if name != own
    }
    listed = "; ".join(f"{name} {','.join(addresses)}" for name, addresses in list(others.items())[:6] if addresses)
    if not twins and not listed:
        return error
    if twins:
        found += f", and the other machine of {ranks_text(twins)} has the same address, such as that of a bridge on each machine"
    if listed:
        found += f"; the node also has {listed}"
    return error.restated(
        f"{error}{found}. If the nodes reach each other at another address, start Ray on each with --node-ip-address."
    )


def _refused(
    error: FracBackendError, sentence: str, decision: Decision, workers: Sequence[WorkerInfo]
) -> SharedDeviceError:
    groups = decision.share_groups or mig_siblings(workers)
    who = share_text(groups) if groups else f"{ranks_text(error.ranks) if error.ranks else 'ranks'} share a GPU"
    return SharedDeviceError(
        f"NCCL {versions_text(workers)} refused the start: {who} ({sentence}).",
        advice=_advice(decision, workers),
        ranks=sharing_ranks(groups) or error.ranks,
        kind="refused",
        step=error.step,
        cause=sentence,
    )


def _advice(decision: Decision, workers: Sequence[WorkerInfo]) -> str:
    has_gloo = _has_gloo(workers)
    if kept := kept_settings(workers, decision.env_defaults):
        return advise("refused with the user's settings", settings=", ".join(kept), has_gloo=has_gloo)
    return advise("refused with flags" if decision.env_defaults else "refused without flags", has_gloo=has_gloo)


def _has_gloo(workers: Sequence[WorkerInfo]) -> bool:
    """Return whether all workers can use Gloo."""
    return all(worker.gloo_available and worker.network.gloo_missing is None for worker in workers)
