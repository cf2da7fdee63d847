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
    GroupFormationError,
    SharedDeviceError,
    StartTimeoutError,
    UnreachableMasterError,
    VerificationError,
)


def explained(
    error: FracBackendError, decision: Decision, workers: Sequence[WorkerInfo], master_addr: str
) -> FracBackendError:
    """Return the error with advice from the plan and the workers.

    Args:
        error: The error of the start.
        decision: The decision that was tried.
        workers: Every rank, in rank order.
        master_addr: The address of rank 0's store that was tried.

    Returns:
        SharedDeviceError if NCCL refused ranks on one GPU, else the error.
    """
    if isinstance(error, UnreachableMasterError):
        error.advice += _other_addresses(workers[0], master_addr)
    if not decision.backends.has_nccl:
        return error
    has_gloo = all(worker.network.gloo_missing is None for worker in workers)
    if error.kind == "refused":
        return _refused(error, error.cause, decision, workers, has_gloo)
    is_timeout = isinstance(error, StartTimeoutError)
    # NCCL connects in the verification, with torch 2.15 when the group is made.
    is_failed_check = isinstance(error, (VerificationError, GroupFormationError))
    if (is_timeout or is_failed_check) and interface_doubts(workers):
        return error  # NCCL calls this an invalid usage too; the plan has a warning about it
    if error.kind == "invalid_usage" and decision.share_groups:
        return _refused(error, "ncclInvalidUsage", decision, workers, has_gloo)
    if decision.share_groups and (is_timeout or (is_failed_check and error.kind == "stalled")):
        error.advice += f" {advise('several ranks hang', has_gloo=has_gloo)}"
    return error


def _other_addresses(first: WorkerInfo, master_addr: str) -> str:
    """Return the other addresses of rank 0's node if Ray's address was used, such as that of a VPN or of a bridge."""
    interfaces = first.network.interfaces
    own = owner_of(interfaces, master_addr)
    others = {
        name: [address for address in addresses if not is_loopback(address) and not is_link_local(address)]
        for name, addresses in interfaces.items()
        if name != own
    }
    listed = "; ".join(f"{name} {','.join(addresses)}" for name, addresses in list(others.items())[:6] if addresses)
    if normal(master_addr) != normal(first.node_ip) or not listed:
        return ""
    return (
        f" Ray's address of rank 0's node is {master_addr}; the node also has {listed}. If the nodes reach each other at another "
        "address, start Ray on each with --node-ip-address."
    )


def _refused(
    error: FracBackendError, sentence: str, decision: Decision, workers: Sequence[WorkerInfo], has_gloo: bool
) -> SharedDeviceError:
    groups = decision.share_groups or mig_siblings(workers)
    who = share_text(groups) if groups else f"{ranks_text(error.ranks) if error.ranks else 'ranks'} share a GPU"
    if kept := kept_settings(workers, decision.env_defaults):
        advice = advise("refused with the user's settings", settings=", ".join(kept), has_gloo=has_gloo)
    else:
        advice = advise("refused with flags" if decision.env_defaults else "refused without flags", has_gloo=has_gloo)
    return SharedDeviceError(
        f"NCCL {versions_text(workers)} refused the start: {who} ({sentence}).",
        advice=advice,
        ranks=sharing_ranks(groups) or error.ranks,
        kind="refused",
        step=error.step,
        cause=sentence,
    )
