"""The outcome of each row of the table: the error of a guard; the decision of a choice, or the error if it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping

from ray_fracbackend.decide.backends import STAGED
from ray_fracbackend.decide.device_sharing import ShareGroup, share_text, sharing_ranks
from ray_fracbackend.decide.hints import cost_warning, debug_level_warnings, hints
from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.nccl import (
    MULTI_RANK_ENV,
    NCCL_MULTI_RANK,
    interface_doubts,
    kept_settings,
    mig_siblings,
    multi_rank_env,
    versions_text,
)
from ray_fracbackend.decide.plan import Decision, FallBack
from ray_fracbackend.decide.rendezvous import is_one_node
from ray_fracbackend.decide.worker_info import ranks_text, version_text
from ray_fracbackend.errors import (
    BackendUnavailableError,
    FracBackendError,
    IncompatibleWorkersError,
    MissingDeviceError,
    SharedDeviceError,
)

# Why Gloo receives no CUDA tensor on Windows, unless the user selects it explicitly.
_NO_GLOO_ON_WINDOWS = "on Windows an all_reduce of CUDA tensors through Gloo ends the process (pytorch#186535)"


# Guards


def mixed_systems(job: Job) -> FracBackendError:
    """Return the error for Windows and other systems in one job."""
    return IncompatibleWorkersError(
        f"Windows on {ranks_text(job.windows_ranks)}, Linux or macOS on the others. Gloo cannot connect Windows with other "
        "systems (gloo#386); place all workers on nodes of one system.",
        ranks=job.windows_ranks,
    )


def nccl_without_gpus(job: Job) -> FracBackendError:
    """Return the error for an explicit NCCL on workers without any GPU."""
    ranks = job.ranks_without_nccl_or_device
    return MissingDeviceError(
        f"backend={job.settings.backend!r} needs GPUs and NCCL, and {ranks_text(ranks)} lack{'s' if len(ranks) == 1 else ''} one of "
        "them. Ask for GPUs in ScalingConfig(use_gpu=True), or leave backend out.",
        ranks=ranks,
    )


def missing_cuda(job: Job) -> FracBackendError:
    """Return the error for GPUs of Ray that torch cannot use."""
    return MissingDeviceError(
        f"{job.missing_cuda_text}. Every GPU worker needs a CUDA device; correct num_gpus of those nodes or their torch and "
        "driver, or set FracTorchConfig(on_missing_cuda='cpu') to train on the CPU.",
        ranks=[worker.rank for worker in job.workers_without_cuda],
    )


def compute_mode(job: Job) -> FracBackendError:
    """Return the error for a compute mode that allows no second process on a device."""
    group = job.exclusive_without_mps[0]
    return SharedDeviceError(
        f"{group.text}, which is in compute mode EXCLUSIVE_PROCESS: one process at a time without MPS. Run "
        "`nvidia-smi -c DEFAULT` on that node, or start the MPS daemon on Linux (`nvidia-cuda-mps-control -d`).",
        ranks=group.ranks,
    )


def shared_error(job: Job) -> FracBackendError:
    """Return the error for shared devices that the policy forbids."""
    return SharedDeviceError(
        f"{share_text(job.conflicts)}, and on_shared_device='error' forbids it. Ask for a whole GPU per worker or for fewer "
        "workers, or set on_shared_device to 'auto' or 'gloo'.",
        ranks=sharing_ranks(job.conflicts),
    )


def mixed_versions(job: Job) -> IncompatibleWorkersError:
    """Return the error for different NCCL versions."""
    ranks_by_version = {
        version_text(version): [worker.rank for worker in job.workers if worker.nccl_version == version]
        for version in job.nccl_versions
    }
    listed = "; ".join(f"{ranks_text(ranks)}: {version}" for version, ranks in sorted(ranks_by_version.items()))
    return IncompatibleWorkersError(
        f"the workers loaded different NCCL versions ({listed}). NCCL needs one version on all ranks; install the same "
        "torch and nvidia-nccl packages on every node, or use backend='gloo'."
    )


# Choices


def without_gpus(job: Job) -> Decision:
    """Choose Gloo for workers without GPUs, or the requested backend."""
    backends = job.settings.backends
    if backends.has_ipc:
        return _ipc(job, "backend='ipc'", on="cpu")
    if backends.has_nccl:
        return _decided(job, "nccl", f"using {backends.name} as requested")
    if backends.is_auto:
        return _gloo(job, "using gloo (no GPUs were asked for)", on="cpu")
    make = _staged if backends.has_staged else _gloo
    return make(job, f"using {backends.name} (as requested)", on="cpu", backend=backends.name)


def gloo_without_cuda(job: Job) -> Decision:
    """Choose an explicit Gloo for GPU workers whose torch has no CUDA, as stock does."""
    backend = job.settings.backends.name
    warning = (
        f"{job.missing_cuda_text}: {backend} starts anyway, as with TorchConfig, and a train function that uses "
        "ray.train.torch.get_device() will fail; on_missing_cuda='cpu' trains on the CPU"
    )
    return _gloo(job, f"using {backend} as requested", on="cpu", backend=backend, warnings=(warning,))


def on_cpu(job: Job) -> Decision:
    """Train on the CPU, as ``on_missing_cuda="cpu"`` allows."""
    found = f"{job.missing_cuda_text}: training on the CPU"
    if job.wants_ipc_on_cpu:
        return _ipc(job, found, on="cpu", train_on_cpu=True)
    return _gloo(job, f"{found} with gloo", on="cpu", train_on_cpu=True)


def multi_rank(job: Job) -> Decision:
    """Choose NCCL with its flags for several ranks on one GPU (NCCL env.rst, since 2.30, experimental)."""
    workers, groups, policy = job.workers, job.conflicts, job.settings.on_shared_device
    asked = "on_shared_device='nccl'" if policy == "nccl" else f"{MULTI_RANK_ENV}=1 is set"
    old = [w for w in workers if not w.nccl_available or w.nccl_version is None or w.nccl_version < NCCL_MULTI_RANK]
    if old:
        ranks = [worker.rank for worker in old]
        raise BackendUnavailableError(
            f"{asked} with NCCL {versions_text(old)} ({ranks_text(ranks)}). Several ranks on one GPU need NCCL 2.30 or newer; "
            "install a newer nvidia-nccl package, or use on_shared_device='auto'.",
            ranks=ranks,
        )
    if len(job.nccl_versions) > 1:
        raise mixed_versions(job)
    fullest = max(len(group.ranks) for group in groups)
    env = multi_rank_env(fullest, len({worker.node_id for worker in workers}) > 1)
    warnings = tuple(f"{setting} was set by the user and is kept" for setting in kept_settings(workers, env))
    return _decided(
        job,
        "nccl",
        f"using nccl with several ranks per GPU ({asked}, NCCL {versions_text(workers)})",
        groups=groups,
        env=env,
        falls_back=FallBack.AFTER_FAILURE if policy == "auto" else FallBack.NEVER,
        warnings=warnings,
    )


def ipc_on_devices(job: Job) -> Decision:
    """Choose the ipc backend, requested by name or by the policy."""
    return _ipc(job, "backend='ipc'" if job.settings.backends.has_ipc else "on_shared_device='ipc'")


def staged_on_devices(job: Job) -> Decision:
    """Choose the staged backend, requested by name or by the policy."""
    if not job.settings.backends.has_staged:
        return _staged(job, "using staged (selected by on_shared_device)", job.conflicts)
    backend = job.settings.backends.name
    return _staged(job, f"using {backend} as requested", job.shared, backend=backend)


def gloo_on_devices(job: Job) -> Decision:
    """Choose Gloo, requested by name or by the policy."""
    if job.wants_nccl:
        return _instead_of_nccl(job, "selected by on_shared_device")
    backend, warnings = job.settings.backends.name, tuple[str, ...]()
    if job.windows_ranks and job.settings.backends.by_device.get("cuda") == "gloo":
        warnings = (
            f"{_NO_GLOO_ON_WINDOWS}, seen with torch 2.12; these workers have {job.workers[0].torch_version}. backend={backend!r} is "
            f"kept as requested, 'auto' would use {STAGED}",
        )
    return _gloo(job, f"using {backend} as requested", job.shared, backend=backend, warnings=warnings)


def instead_of_nccl(job: Job) -> Decision:
    """Choose Gloo, on Windows staged, because ranks share devices or NCCL is missing on a rank; warn if NCCL is on others."""
    if len(job.ranks_without_nccl) == len(job.workers):
        return _instead_of_nccl(job, "torch has no NCCL")
    warnings = (cost_warning(job, STAGED if job.windows_ranks else "gloo"),)
    if job.ranks_without_nccl:
        return _instead_of_nccl(job, f"torch of {ranks_text(job.ranks_without_nccl)} has no NCCL", warnings)
    refused = "shared devices" if any(group.same_device for group in job.conflicts) else "MIG slices of one GPU"
    return _instead_of_nccl(job, f"NCCL {versions_text(job.workers)} refuses {refused}", warnings)


def own(job: Job) -> Decision:
    """Choose NCCL if every rank has its own device."""
    name = "nccl" if job.settings.backends.is_auto else job.settings.backends.name
    reason = f"every rank has a device of its own: using {name} (NCCL {versions_text(job.workers)})"
    if siblings := mig_siblings(job.workers):
        # NCCL's source allows these ranks, but users saw it refuse them (nccl#1716): let the verification decide.
        doubt = f"{siblings[0].text}: NCCL {versions_text(job.workers)} may refuse them"
        return _decided(job, "nccl", reason, falls_back=FallBack.AFTER_FAILURE, warnings=(doubt,))
    falls_back = FallBack.AFTER_REFUSAL if job.settings.on_shared_device in ("auto", "gloo") else FallBack.NEVER
    return _decided(job, "nccl", reason, falls_back=falls_back)


def _instead_of_nccl(job: Job, why: str, warnings: tuple[str, ...] = ()) -> Decision:
    """Choose Gloo for workers that train on CUDA devices if no backend was requested; on Windows the staged backend."""
    if job.windows_ranks:
        return _staged(job, f"using staged ({why}; {_NO_GLOO_ON_WINDOWS})", job.conflicts, warnings=warnings)
    return _gloo(job, f"using gloo ({why})", job.conflicts, warnings=warnings)


def _ipc(job: Job, asked: str, *, on: str = "cuda", train_on_cpu: bool = False) -> Decision:
    """Choose the ipc backend, or raise an error that names the first worker that cannot share host memory."""
    one_node = is_one_node(job.workers)
    for worker in job.workers:
        elsewhere = "" if one_node or worker.node_id == job.workers[0].node_id else "it is for workers on one node"
        if missing := worker.ipc_host_memory_missing or elsewhere:
            raise BackendUnavailableError(
                f"{asked}, but the ipc backend cannot be used: {worker.where}: {missing}. Fix this, or leave ipc out.",
                ranks=(worker.rank,),
            )
    if on == "cpu":
        return _decided(job, "ipc", f"{asked}: using ipc on host memory", on="cpu", train_on_cpu=train_on_cpu)
    return _decided(job, "ipc", "using ipc (as requested)", groups=job.conflicts)


def _staged(
    job: Job,
    reason: str,
    groups: tuple[ShareGroup, ...] = (),
    *,
    on: str = "cuda",
    backend: str = STAGED,
    warnings: tuple[str, ...] = (),
) -> Decision:
    """Choose the staged backend, or raise an error that names the first worker that cannot use it."""
    without = [worker for worker in job.workers if worker.staged_missing]
    if without:
        raise BackendUnavailableError(
            f"{reason}, but the staged backend cannot be used: {without[0].where}: {without[0].staged_missing}.",
            ranks=[worker.rank for worker in without],
        )
    return _gloo(job, reason, groups, on=on, backend=backend, warnings=warnings)


def _gloo(
    job: Job,
    reason: str,
    groups: tuple[ShareGroup, ...] = (),
    *,
    on: str = "cuda",
    backend: str = "gloo",
    train_on_cpu: bool = False,
    warnings: tuple[str, ...] = (),
) -> Decision:
    """Choose Gloo on all workers, alone or in a pair, or raise an error if torch was built without it."""
    for worker in job.workers:
        if missing := worker.network.gloo_missing:
            raise BackendUnavailableError(f"{reason}, but {worker.where}: {missing}.", ranks=(worker.rank,))
    return _decided(job, backend, reason, on=on, groups=groups, train_on_cpu=train_on_cpu, warnings=warnings)


def _decided(
    job: Job,
    backend: str,
    reason: str,
    *,
    on: str = "cuda",
    groups: tuple[ShareGroup, ...] = (),
    env: Mapping[str, str] | None = None,
    falls_back: FallBack = FallBack.NEVER,
    train_on_cpu: bool = False,
    warnings: tuple[str, ...] = (),
) -> Decision:
    """Create the decision, with a warning about an overridden backend, and hints."""
    asked = job.settings.backends
    if backend == "nccl":
        backend = asked.name if asked.has_nccl else backend
        warnings += interface_doubts(job.workers)
    elif asked.has_nccl or (asked.has_staged and train_on_cpu):
        warnings = (f"backend={job.settings.backend!r} cannot be used here: using {backend}", *warnings)
    if backend == "gloo":
        warnings += debug_level_warnings(job)
    return Decision(
        backend=backend,
        device_type=on,
        reason=f"{share_text(groups)}: {reason}" if groups else reason,
        share_groups=groups,
        env_defaults=env or {},
        fallback=None if falls_back is FallBack.NEVER else "gloo",  # NCCL exists only where Gloo carries CUDA tensors
        falls_back=falls_back,
        train_on_cpu=train_on_cpu,
        hints=hints(job) if on == "cuda" else (),
        warnings=warnings,
    )
