"""Explain why ranks that share a device cannot use NCCL, what this costs, and what to do."""

from __future__ import annotations

from ray_fracbackend.decide.device_sharing import sharing_ranks
from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.nccl import NCCL_MULTI_RANK, versions_text
from ray_fracbackend.decide.plan import GLOO_COST
from ray_fracbackend.decide.worker_info import ranks_text


def why_not_nccl(job: Job) -> str:
    """Return why NCCL does not accept these ranks, in one clause."""
    if job.without_nccl:
        every = len(job.without_nccl) == len(job.workers)
        return "torch has no NCCL" if every else f"torch of {ranks_text(job.without_nccl)} has no NCCL"
    version = versions_text(job.workers)
    if not any(group.same_device for group in job.conflicts):
        return f"NCCL {version} compares PCI bus ids and refuses them"
    # NCCL refuses the job because of one such group, whatever the others are.
    seen = any(len({job.workers[rank].nccl_host for rank in group.ranks}) < len(group.ranks) for group in job.conflicts)
    if not seen:
        return f"NCCL {version} does not see it across host names and can hang"
    can = all(worker.nccl_version and worker.nccl_version >= NCCL_MULTI_RANK for worker in job.workers)
    return f"NCCL {version} refuses shared devices{' by default' if can else ''}"


def debug_level_warnings(job: Job) -> tuple[str, ...]:
    """Return the warning about a debug level under which DDP on Gloo crashes, if a rank has it."""
    ranks = [w.rank for w in job.workers if w.env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"]
    if not ranks:
        return ()
    return (
        f"TORCH_DISTRIBUTED_DEBUG=DETAIL on {ranks_text(ranks)}: in torch 2.13.0, DDP on Gloo ends the process with SIGSEGV under "
        "DETAIL; use INFO, or backend='ipc'",
    )


def without_nccl_warning(job: Job, backend: str) -> str:
    """Return the warning about the cost of another backend instead of NCCL.

    The reason of the decision names the ranks that share and says why NCCL does not accept them.

    Args:
        job: Workers that share devices.
        backend: The backend that is used instead.
    """
    groups, ranks = job.conflicts, sharing_ranks(job.conflicts)
    found = f"{len(ranks)} of {len(job.workers)} ranks share a GPU, so all ranks use {backend} instead of nccl: {GLOO_COST}."
    accept = "on_shared_device='gloo' accepts this without a warning, 'error' refuses such a start"
    if not any(group.same_device for group in groups):
        return f"{found} NCCL 2.30.7 or newer accepts MIG slices as different devices; {accept}."
    if all(job.workers[rank].gpu_fraction >= 1 for rank in ranks):
        chosen_early = _chosen_early(job)
        if chosen_early:
            return f"{found} {chosen_early}; {accept}."
        return (
            f"{found} Each of them asked for a whole GPU, so the cluster assigns one GPU several times (time-slicing in "
            "Kubernetes, containers or Ray nodes that share a GPU, --num-gpus higher than the number of GPUs). Give every Ray node "
            f"GPUs of its own, or leave those nodes out; {accept}."
        )
    if job.has_gpu_for_each:
        num_gpus = sum(job.node_gpus.values())
        return f"{found} Ray has {num_gpus:g} GPUs: ask for more than half a GPU per worker and NCCL can be used; {accept}."
    return f"{found} {accept}."


def _chosen_early(job: Job) -> str | None:
    """Return a note for whole GPUs that CUDA counts as one: a process chose its device before Ray set its variable."""
    for group in job.conflicts:
        for node_id in {job.workers[rank].node_id for rank in group.ranks}:
            members = [job.workers[rank] for rank in group.ranks if job.workers[rank].node_id == node_id]
            ids = sorted({",".join(member.gpu_ids) for member in members if member.gpu_ids})
            if len(ids) == len(members) > 1:
                return (
                    f"Ray assigned {ranks_text([member.rank for member in members])} the GPUs {' and '.join(ids[:4])} of node "
                    f"{members[0].node_ip}, and in each of these processes CUDA has the same one: it was chosen before Ray set "
                    "CUDA_VISIBLE_DEVICES, or the variable was overwritten. Do not use CUDA at the import of a module or in a "
                    "worker_process_setup_hook, and leave the variable to Ray"
                )
    return None
