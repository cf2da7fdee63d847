"""What a job on shared devices should know: the cost of its backend, an unused part of a GPU, LOCAL_RANK. Changes no decision."""

from __future__ import annotations

from collections import defaultdict

from ray_fracbackend.decide.device_sharing import sharing_ranks, workers_per_gpu
from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.plan import GLOO_COST
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text

# Less of a GPU may be left for the CUDA contexts of its workers.
_UNUSED_GPU = 0.15
# Users report 80 to 90 % of the memory; the rest is for the desktop and the display driver.
_LEFT_BY_WINDOWS = 0.9


def cost_warning(job: Job, backend: str) -> str:
    """Return the warning about the cost of a backend that is used instead of NCCL because ranks share devices or some have no NCCL."""
    if not job.conflicts:
        return f"all {len(job.workers)} ranks use {backend} instead of nccl, which torch of {ranks_text(job.ranks_without_nccl)} lacks: {GLOO_COST}"
    return (
        f"{len(sharing_ranks(job.conflicts))} of {len(job.workers)} ranks share a GPU, so all ranks use {backend} instead of nccl: "
        f"{GLOO_COST}. on_shared_device='gloo' accepts this without a warning, 'error' refuses such a start."
    )


def debug_level_warnings(job: Job) -> tuple[str, ...]:
    """Return the warning about a debug level under which DDP on Gloo crashes, if a rank has it."""
    ranks = [w.rank for w in job.workers if w.env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"]
    text = "in torch 2.13.0, DDP on Gloo ends the process with SIGSEGV under DETAIL; use INFO, or backend='ipc'"
    return (f"TORCH_DISTRIBUTED_DEBUG=DETAIL on {ranks_text(ranks)}: {text}",) if ranks else ()


def hints(job: Job) -> tuple[str, ...]:
    """Return advice for a job on CUDA devices, one line each."""
    return tuple(hint for hint in (_fraction(job.workers[0]), _local_rank(job)) if hint)


def _fraction(worker: WorkerInfo) -> str | None:
    fraction, on_windows = worker.gpu_fraction, worker.platform == "win32"
    if not 0 < fraction < 1:
        return None
    count = workers_per_gpu(fraction)
    unused = 1 - count * fraction
    if on_windows and round(1 - unused, 4) > _LEFT_BY_WINDOWS:
        return (
            f"{count} workers with {fraction:g} GPU may need more memory than Windows leaves them; NVIDIA's driver then uses system memory, "
            f"slowly and without an error: ask for {int(100 * _LEFT_BY_WINDOWS / count) / 100:g} GPU, and set limit_gpu_memory=True"
        )
    if unused < _UNUSED_GPU or on_windows:
        return None
    return f"with {fraction:g} GPU per worker, Ray places {count} on a GPU and {unused:.2g} of it stays unused"


def _local_rank(job: Job) -> str | None:
    """Find the first rank whose local rank is the index of another device; CUDA itself reports an invalid index."""
    local_ranks: dict[str, int] = defaultdict(int)
    for worker in job.workers:
        local_rank = local_ranks[worker.node_id]
        local_ranks[worker.node_id] += 1
        if worker.device is not None and worker.device.index != local_rank < worker.num_visible_devices:
            return (
                f"LOCAL_RANK {local_rank} is not the device of rank {worker.rank} on node {worker.node_ip}, which is "
                f"cuda:{worker.device.index}; use ray.train.torch.get_device()"
            )
    return None
