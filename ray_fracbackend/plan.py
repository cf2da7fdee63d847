"""The decision: from what every worker sits on to one backend for the job, and why. Pure; runs on driver or controller.

Example: two workers at half a GPU each on a node with one device, torch with NCCL 2.28.9::

    ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.3: using gloo (NCCL 2.28.9 refuses shared devices)

The rows that the comments name are those of docs/how-it-decides.md; shared_plan.py has the rows on shared devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ray_fracbackend import shared_plan
from ray_fracbackend.errors import IncompatibleWorkersError, MissingDeviceError
from ray_fracbackend.facts import WorkerFacts, ranks_text
from ray_fracbackend.hints import add_hints
from ray_fracbackend.options import StartOptions
from ray_fracbackend.shared_plan import check_compute_modes, check_one_nccl, ipc_device_plan, plan_shared
from ray_fracbackend.sharing import (
    NCCL_MULTI_RANK,
    ShareGroup,
    mig_siblings,
    multi_rank_obstacle,
    nccl_confusions,
    share_text,
    shared_devices,
    versions_text,
)
from ray_fracbackend.start_plan import GLOO_COST, StartPlan, gloo_plan, ipc_host_plan

_OURS = {"auto", "nccl", "gloo", "ipc"}
# Ray resources of accelerators whose start is Ray's own business.
_FOREIGN_ACCELERATORS = ("TPU", "HPU", "NPU", "neuron_cores")


def left_to_ray(backend: str, resources_per_worker: Mapping[str, float]) -> str | None:
    """Why the start is Ray's own business and stays untouched (row 2), or None where it is ours."""
    if not _is_ours(backend):
        return f"backend {backend!r} is left to Ray Train"
    for name in _FOREIGN_ACCELERATORS:
        if resources_per_worker.get(name, 0) > 0:
            return f"{name} workers are left to Ray Train"
    return None


def plan_start(
    workers: Sequence[WorkerFacts], options: StartOptions, node_gpus: Mapping[str, float] | None = None
) -> StartPlan:
    """Decide how to start. The outcome does not depend on the order of the ranks.

    Args:
        workers: Facts of every rank, in rank order, at least one.
        options: What the user asked for.
        node_gpus: GPUs that Ray gives out on each node, by Ray's node id; for hints.

    Returns:
        The plan, with reasons, hints and warnings.

    Raises:
        SharedDeviceError: Devices are shared and ``on_shared_device="error"``, or their compute mode forbids it.
        MissingDeviceError: GPUs were asked for that torch does not have, and ``on_missing_cuda="error"``.
        IncompatibleWorkersError: Mixed NCCL versions where NCCL is needed, or Windows and Linux in one job.
        BackendUnavailableError: The backend that was asked for cannot run on these workers.
    """
    _check_platforms(workers)
    if not any(worker.gpu_fraction > 0 for worker in workers):
        return _plan_without_gpus(workers, options)
    if any(_lacks_cuda(worker) for worker in workers):
        return _plan_missing_cuda(workers, options)
    return add_hints(_plan_on_devices(workers, options), workers, node_gpus or {})


def asks_for_ipc(options: StartOptions) -> bool:
    """Whether a start with these settings may choose the ipc backend, so that its probe is worth its cost."""
    return (
        options.backend == "ipc"
        or options.on_shared_device == "ipc"
        or (options.on_shared_device == "auto" and shared_plan.AUTO_TAKES_DEVICE_IPC)
    )


def _is_ours(backend: str) -> bool:
    if backend in _OURS:
        return True
    parts = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return set(parts) <= {"cpu", "cuda"} and bool(parts) and set(parts.values()) <= {"gloo", "nccl"}


def _wants_nccl(backend: str) -> bool:
    return backend in ("auto", "nccl") or backend.endswith("nccl") or "cuda:nccl" in backend


def _lacks_cuda(worker: WorkerFacts) -> bool:
    return worker.cuda_missing is not None or (worker.gpu_fraction > 0 and not worker.devices)


def _check_platforms(workers: Sequence[WorkerFacts]) -> None:
    windows = [worker.rank for worker in workers if worker.platform == "win32"]
    if windows and len(windows) < len(workers):
        raise IncompatibleWorkersError(
            f"Windows under {ranks_text(windows)}, another system under the others. Gloo cannot connect Windows with other systems "
            "(gloo#386); place all workers on nodes of one system.",
            ranks=windows,
        )


def _plan_without_gpus(workers: Sequence[WorkerFacts], options: StartOptions) -> StartPlan:
    """Row 1: no GPU asked for."""
    if options.backend == "ipc":
        return ipc_host_plan(workers, "backend='ipc'")
    if options.backend not in ("auto", "gloo") and _wants_nccl(options.backend):
        without = [worker.rank for worker in workers if not worker.nccl_available or worker.num_visible_devices == 0]
        if without:
            raise MissingDeviceError(
                f"backend={options.backend!r} for {ranks_text(without)} without a GPU, or with a torch without NCCL. NCCL works "
                "on CUDA devices only; ask for GPUs in ScalingConfig(use_gpu=True), or use backend='auto' or 'gloo'.",
                ranks=without,
            )
        return StartPlan(backend=options.backend, device_type="cuda", reason=f"using {options.backend} as asked for")
    if options.backend in ("auto", "gloo"):
        why = "no GPUs were asked for" if options.backend == "auto" else "as asked for"
        return gloo_plan(workers, f"using gloo ({why})", device_type="cpu")
    return StartPlan(backend=options.backend, device_type="cpu", reason=f"using {options.backend} as asked for")


def _plan_missing_cuda(workers: Sequence[WorkerFacts], options: StartOptions) -> StartPlan:
    """Row 3: Ray gave GPUs, torch sees none."""
    missing = [worker for worker in workers if _lacks_cuda(worker)]
    ranks = [worker.rank for worker in missing]
    causes = dict.fromkeys(f"node {w.node_ip}: {w.cuda_missing or 'no CUDA device was found'}" for w in missing)
    found = f"Ray gave {ranks_text(ranks)} GPUs that torch cannot use ({'; '.join(list(causes)[:4])})"
    if options.on_missing_cuda == "error" and not (_wants_nccl(options.backend) or options.backend == "ipc"):
        plan = gloo_plan(workers, f"using {options.backend} as asked for", device_type="cpu")
        warning = (
            f"{found}: {options.backend} starts all the same, as with TorchConfig, and a train function that uses "
            "ray.train.torch.get_device() will fail; on_missing_cuda='cpu' trains on the CPU"
        )
        return replace(plan, backend=options.backend, warnings=(warning,))
    if options.on_missing_cuda == "error":
        raise MissingDeviceError(
            f"{found}. Every GPU worker needs a CUDA device; correct num_gpus of those nodes or their torch and driver, "
            "or set FracTorchConfig(on_missing_cuda='cpu') to train on the CPU.",
            ranks=ranks,
        )
    if options.backend == "ipc" or (options.backend == "auto" and options.on_shared_device == "ipc"):
        return replace(ipc_host_plan(workers, f"{found}: training on the CPU"), train_on_cpu=True)
    plan = gloo_plan(workers, f"{found}: training on the CPU with gloo", device_type="cpu")
    plan = replace(plan, train_on_cpu=True)
    if options.backend not in ("auto", "gloo"):
        plan = replace(plan, warnings=(f"backend={options.backend!r} needs CUDA devices: using gloo",))
    return plan


def _plan_on_devices(workers: Sequence[WorkerFacts], options: StartOptions) -> StartPlan:
    """Rows 4 to 12: every worker has a CUDA device."""
    shared = shared_devices(workers)
    check_compute_modes(workers, shared)
    if not _wants_nccl(options.backend):
        return _explicit(workers, options, shared)
    without_nccl = [worker.rank for worker in workers if not worker.nccl_available]
    conflicts = shared if without_nccl else (*shared, *nccl_confusions(workers))
    siblings = mig_siblings(workers)
    asked = options.on_shared_device == "nccl" or (
        options.on_shared_device != "error" and siblings and multi_rank_obstacle(workers, siblings) is None
    )
    has_flags = all(worker.nccl_available and (worker.nccl_version or (0,)) >= NCCL_MULTI_RANK for worker in workers)
    if asked and has_flags and not conflicts:
        conflicts = siblings  # told apart by NCCL's source, refused without the flags as users saw it (nccl#1716)
    if conflicts:
        return plan_shared(workers, options, conflicts)
    if without_nccl:  # row 5
        plan = gloo_plan(workers, f"using gloo ({ranks_text(without_nccl)}: torch has no NCCL)")
        if options.backend != "auto":
            return replace(plan, warnings=(f"backend={options.backend!r} is not available: using gloo",))
        if len(without_nccl) < len(workers):
            warning = (
                f"torch of {ranks_text(without_nccl)} has no NCCL, so all {len(workers)} ranks use gloo: {GLOO_COST}; "
                "install the same torch with NCCL on every node"
            )
            return replace(plan, warnings=(warning,))
        return plan
    check_one_nccl(workers)
    backend = "nccl" if options.backend == "auto" else options.backend
    version = versions_text(workers)
    plan = StartPlan(
        backend=backend,
        device_type="cuda",
        reason=f"every rank has a device of its own: using {backend} (NCCL {version})",
    )
    if siblings:
        # NCCL's source allows these, users saw it refuse them (nccl#1716): let the verification decide.
        doubt = f"{siblings[0].text}: NCCL {version} may refuse them"
        plan = replace(plan, fallback="gloo", warnings=(doubt,))
    return plan


def _explicit(workers: Sequence[WorkerFacts], options: StartOptions, shared: tuple[ShareGroup, ...]) -> StartPlan:
    """A backend that needs no NCCL was asked for by name; sharing that the user forbade stays forbidden."""
    if shared and options.on_shared_device == "error":
        return plan_shared(workers, options, shared)
    if options.backend == "ipc":
        return ipc_device_plan(workers, shared, "backend='ipc'")
    prefix = f"{share_text(shared)}: " if shared else ""
    plan = gloo_plan(workers, f"{prefix}using {options.backend} as asked for", shared)
    return replace(plan, backend=options.backend)
