"""Rows 6 to 12 of the decision: what to do with ranks that share a device. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray_fracbackend.errors import (
    BackendUnavailableError,
    IncompatibleWorkersError,
    MissingDeviceError,
    SharedDeviceError,
)
from ray_fracbackend.facts import WorkerFacts, ranks_text, version_text
from ray_fracbackend.nccl_multi_rank import kept_settings, multi_rank_env
from ray_fracbackend.options import StartOptions
from ray_fracbackend.sharing import (
    MULTI_RANK_ENV,
    NCCL_MULTI_RANK,
    ShareGroup,
    multi_rank_obstacle,
    share_text,
    versions_text,
)
from ray_fracbackend.start_plan import GLOO_COST, StartPlan, gloo_plan

# Row 10: whether "auto" takes ipc for device memory. To be turned once a recorded run on a GPU has proven it;
# on_shared_device="ipc" (row 9) does not ask.
AUTO_TAKES_DEVICE_IPC = False


def plan_shared(workers: Sequence[WorkerFacts], options: StartOptions, groups: tuple[ShareGroup, ...]) -> StartPlan:
    """Rows 6 to 11: devices are shared, the policy decides."""
    policy, text = options.on_shared_device, share_text(groups)
    ranks = sorted({rank for group in groups for rank in group.ranks})
    if policy == "error":
        raise SharedDeviceError(
            f"{text}, and on_shared_device='error' forbids it. Ask for a whole GPU a worker or for fewer workers, or set "
            "on_shared_device to 'auto' or 'gloo'.",
            ranks=ranks,
        )
    if policy == "nccl":
        plan = _nccl_multi_rank(workers, groups, "on_shared_device='nccl'")
    elif multi_rank_obstacle(workers, groups) is None:
        plan = _nccl_multi_rank(workers, groups, f"{MULTI_RANK_ENV}=1 is set")
        if policy in ("auto", "gloo"):
            plan = replace(plan, fallback="gloo")
        if policy != "auto":
            override = f"on_shared_device={policy!r} does not count: the user's {MULTI_RANK_ENV}=1 asks for nccl"
            plan = replace(plan, warnings=(*plan.warnings, override))
    elif policy == "ipc" or (policy == "auto" and AUTO_TAKES_DEVICE_IPC and _ipc_obstacle(workers, groups) is None):
        plan = ipc_device_plan(workers, groups, f"on_shared_device={policy!r}")
        plan = replace(plan, fallback="gloo" if policy == "auto" else None)
    else:
        why = "as on_shared_device says" if policy == "gloo" else _why_not_nccl(workers, groups)
        plan = gloo_plan(workers, f"{text}: using gloo ({why})", groups)
        if policy == "auto" and any(worker.nccl_available for worker in workers):
            plan = replace(plan, warnings=(_gloo_warning(workers, groups, why),))
    if options.backend == "auto":
        return plan
    if plan.backend == "nccl":
        return replace(plan, backend=options.backend)
    override = f"backend={options.backend!r} cannot be used as it is: on_shared_device={policy!r} chose {plan.backend}"
    return replace(plan, warnings=(". ".join((override, *plan.warnings)),))


def _why_not_nccl(workers: Sequence[WorkerFacts], groups: tuple[ShareGroup, ...]) -> str:
    without = [worker.rank for worker in workers if not worker.nccl_available]
    if without:
        return "torch has no NCCL" if len(without) == len(workers) else f"torch of {ranks_text(without)} has no NCCL"
    version = versions_text(workers)
    if not any(group.same_device for group in groups):
        return f"NCCL {version} compares PCI bus ids and refuses them"
    # One group that NCCL sees is refused at once, whatever becomes of the others.
    seen = any(len({workers[rank].nccl_host for rank in group.ranks}) < len(group.ranks) for group in groups)
    if not seen:
        return f"NCCL {version} does not see it across host names and can hang"
    return f"NCCL {version} refuses shared devices"


def _gloo_warning(workers: Sequence[WorkerFacts], groups: tuple[ShareGroup, ...], why: str) -> str:
    """What it costs that Gloo takes the place of NCCL, and the ways out."""
    ranks = {rank for group in groups for rank in group.ranks}
    found = (
        f"{len(ranks)} of {len(workers)} ranks share a GPU ({share_text(groups)}), so all ranks use gloo instead of nccl "
        f"({why}): {GLOO_COST}."
    )
    accept = "on_shared_device='gloo' accepts this without a warning, 'error' refuses such a start"
    if not any(group.same_device for group in groups):
        return f"{found} NCCL 2.30.7 or newer takes MIG slices for the different devices that they are; {accept}."
    if all(workers[rank].gpu_fraction >= 1 for rank in ranks):
        return (
            f"{found} Each of them asked for a whole GPU: this is how the cluster hands out GPUs (time-slicing in Kubernetes, "
            "containers or Ray nodes with one GPU in common, --num-gpus above what is there). Give every Ray node GPUs of its "
            f"own, or leave those nodes out; {accept}."
        )
    return f"{found} Ask for more than half a GPU per worker where Ray has as many GPUs as workers (`ray status`); {accept}."


def _nccl_multi_rank(workers: Sequence[WorkerFacts], groups: tuple[ShareGroup, ...], asked: str) -> StartPlan:
    """Row 8: NCCL's own flags for several ranks on one GPU (NCCL env.rst, since 2.30, experimental)."""
    old = [
        w.rank for w in workers if not w.nccl_available or w.nccl_version is None or w.nccl_version < NCCL_MULTI_RANK
    ]
    if old:
        raise BackendUnavailableError(
            f"{asked} with NCCL {versions_text([workers[rank] for rank in old])} ({ranks_text(old)}). Several "
            "ranks on one GPU need NCCL 2.30 or newer; install a newer nvidia-nccl package or use on_shared_device='auto'.",
            ranks=old,
        )
    check_one_nccl(workers)
    fullest = max(len(group.ranks) for group in groups)
    env = multi_rank_env(fullest, len({worker.node_id for worker in workers}) > 1)
    warnings = tuple(f"{setting} was set by the user and is kept" for setting in kept_settings(workers, env))
    reason = f"{share_text(groups)}: using nccl with several ranks a GPU ({asked}, NCCL {versions_text(workers)})"
    return StartPlan(
        backend="nccl", device_type="cuda", reason=reason, share_groups=groups, env_defaults=env, warnings=warnings
    )


def _ipc_obstacle(workers: Sequence[WorkerFacts], groups: tuple[ShareGroup, ...]) -> str | None:
    """Why the ipc backend cannot serve these workers on device memory, None where it can (rows 9 and 10)."""
    for group in groups:
        if not group.same_device:
            return f"{group.text}, and slices cannot map each other's memory"
    for worker in workers:
        if worker.ipc_device_memory_missing:
            return f"{worker.where}: {worker.ipc_device_memory_missing}"
    return None


def ipc_device_plan(workers: Sequence[WorkerFacts], groups: tuple[ShareGroup, ...], asked: str) -> StartPlan:
    """Row 9: the ipc backend on device memory, or an error that says what stands against it."""
    obstacle = _ipc_obstacle(workers, groups)
    if obstacle:
        raise BackendUnavailableError(
            f"{asked}, but the ipc backend cannot be used: {obstacle}. Fix this, or use on_shared_device='gloo'."
        )
    prefix = f"{share_text(groups)}: " if groups else ""
    why = _why_not_nccl(workers, groups) if groups else "as asked for"
    return StartPlan(backend="ipc", device_type="cuda", reason=f"{prefix}using ipc ({why})", share_groups=groups)


def check_one_nccl(workers: Sequence[WorkerFacts]) -> None:
    """Row 5: NCCL needs one version on all ranks."""
    versions = {worker.nccl_version for worker in workers}
    if len(versions) > 1:
        ranks_by_version = {
            version_text(version): [worker.rank for worker in workers if worker.nccl_version == version]
            for version in versions
        }
        listed = "; ".join(f"{ranks_text(ranks)}: {version}" for version, ranks in sorted(ranks_by_version.items()))
        raise IncompatibleWorkersError(
            f"the workers loaded different NCCL versions ({listed}). NCCL needs one version on all ranks; install the same "
            "torch and nvidia-nccl packages on every node, or use backend='gloo'."
        )


def check_compute_modes(workers: Sequence[WorkerFacts], shared: tuple[ShareGroup, ...]) -> None:
    """Row 12: say it before CUDA says "device busy or unavailable"."""
    prohibited = [
        worker.rank for worker in workers if worker.devices and worker.devices[0].compute_mode == "prohibited"
    ]
    if prohibited:
        raise MissingDeviceError(
            f"the device of {ranks_text(prohibited)} is in compute mode PROHIBITED, which lets no process use it. "
            "Run `nvidia-smi -c DEFAULT` on that node.",
            ranks=prohibited,
        )
    for group in shared:
        # Any rank's: without NVML one of them may not know it.
        exclusive = any(workers[rank].devices[0].compute_mode == "exclusive_process" for rank in group.ranks)
        if exclusive and not all(workers[rank].mps_reachable for rank in group.ranks):
            raise SharedDeviceError(
                f"{group.text}, which is in compute mode EXCLUSIVE_PROCESS: one process at a time without MPS. Run "
                "`nvidia-smi -c DEFAULT` on that node, or start the MPS daemon (`nvidia-cuda-mps-control -d`).",
                ranks=group.ranks,
            )
