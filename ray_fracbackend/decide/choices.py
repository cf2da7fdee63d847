"""The choices: the decision of each on these workers, or the error if it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping

from ray_fracbackend.decide.backends import STAGED, parse_backend
from ray_fracbackend.decide.cost import debug_level_warnings, why_not_nccl, without_nccl_warning
from ray_fracbackend.decide.device_sharing import ShareGroup, share_text
from ray_fracbackend.decide.hints import device_hints, reservation_hints
from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.nccl import (
    MULTI_RANK_ENV,
    NCCL_MULTI_RANK,
    interface_doubts,
    kept_settings,
    multi_rank_env,
    nvls_demanded,
    versions_text,
)
from ray_fracbackend.decide.plan import GLOO_COST, Decision
from ray_fracbackend.decide.refusals import if_it_helps, mixed_versions
from ray_fracbackend.decide.worker_info import ranks_text
from ray_fracbackend.errors import BackendUnavailableError

# Why Gloo receives no CUDA tensor on Windows, unless the user selects it explicitly.
_NO_GLOO_ON_WINDOWS = "on Windows an all_reduce of CUDA tensors through Gloo ends the process (pytorch#186535)"


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
        f"{job.found_without_cuda}: {backend} starts anyway, as with TorchConfig, and a train function that uses "
        "ray.train.torch.get_device() will fail; on_missing_cuda='cpu' trains on the CPU"
    )
    return _gloo(job, f"using {backend} as requested", on="cpu", backend=backend, warnings=(warning,))


def on_cpu(job: Job) -> Decision:
    """Train on the CPU, as ``on_missing_cuda="cpu"`` allows."""
    found = f"{job.found_without_cuda}: training on the CPU"
    if job.wants_ipc_on_cpu:
        return _ipc(job, found, on="cpu", train_on_cpu=True)
    return _gloo(job, f"{found} with gloo", on="cpu", train_on_cpu=True)


def multi_rank(job: Job) -> Decision:
    """Choose NCCL with its flags for several ranks on one GPU (NCCL env.rst, since 2.30, experimental)."""
    workers, groups, policy = job.workers, job.conflicts, job.settings.on_shared_device
    asked = "on_shared_device='nccl'" if policy == "nccl" else f"{MULTI_RANK_ENV}=1 is set"
    old = [
        w.rank for w in workers if not w.nccl_available or w.nccl_version is None or w.nccl_version < NCCL_MULTI_RANK
    ]
    if old:
        auto = if_it_helps(job, " or use on_shared_device='auto'", on_shared_device="auto")
        raise BackendUnavailableError(
            f"{asked} with NCCL {versions_text([workers[rank] for rank in old])} ({ranks_text(old)}). Several "
            f"ranks on one GPU need NCCL 2.30 or newer; install a newer nvidia-nccl package{auto}.",
            ranks=old,
        )
    if len(job.nccl_versions) > 1:
        raise mixed_versions(job)
    if demanded := nvls_demanded(workers):
        auto = if_it_helps(job, ", or use on_shared_device='auto'", on_shared_device="auto")
        raise BackendUnavailableError(
            f"{asked}, but {demanded}. Unset it or set it to 0{auto}.",
            ranks=[worker.rank for worker in workers if worker.env.get("NCCL_NVLS_ENABLE") == "1"],
        )
    fullest = max(len(group.ranks) for group in groups)
    env = multi_rank_env(fullest, len({worker.node_id for worker in workers}) > 1)
    warnings = tuple(f"{setting} was set by the user and is kept" for setting in kept_settings(workers, env))
    if policy not in ("auto", "nccl"):
        warnings += (
            f"on_shared_device={policy!r} is overridden by the user's {MULTI_RANK_ENV}=1, which requests nccl",
        )
    return _decided(
        job,
        "nccl",
        f"{share_text(groups)}: using nccl with several ranks per GPU ({asked}, NCCL {versions_text(workers)})",
        groups=groups,
        env=env,
        fallback=_fallback(job) if policy in ("auto", "gloo") else None,
        warnings=warnings,
    )


def ipc_on_devices(job: Job) -> Decision:
    """Choose the ipc backend, requested by name or by the policy."""
    return _ipc(job, "backend='ipc'" if job.settings.backends.has_ipc else "on_shared_device='ipc'")


def _ipc(job: Job, asked: str, *, on: str = "cuda", train_on_cpu: bool = False) -> Decision:
    """Choose the ipc backend, or raise an error that names the first worker that cannot share host memory."""
    for worker in job.workers:
        if worker.ipc_host_memory_missing:
            instead = if_it_helps(job, ", or use backend='auto'", backend="auto") or if_it_helps(
                job, ", or use on_shared_device='auto'", on_shared_device="auto"
            )
            raise BackendUnavailableError(
                f"{asked}, but the ipc backend cannot be used: {worker.where}: {worker.ipc_host_memory_missing}. "
                f"Fix this{instead}.",
                ranks=(worker.rank,),
            )
    if on == "cpu":
        return _decided(job, "ipc", f"{asked}: using ipc on host memory", on="cpu", train_on_cpu=train_on_cpu)
    groups, obstacle = job.conflicts, job.device_memory_obstacle
    prefix = f"{share_text(groups)}: " if groups else ""
    staged = f"ipc stages CUDA tensors through host memory, as it cannot share device memory ({obstacle})"
    reason = f"{prefix}using ipc (as requested)"
    return _decided(job, "ipc", reason, groups=groups, warnings=(staged,) if obstacle else ())


def staged_on_devices(job: Job) -> Decision:
    """Choose the staged backend, requested by name or by the policy."""
    if not job.settings.backends.has_staged:
        found = f"{share_text(job.conflicts)}: using staged (selected by on_shared_device)"
        return _staged(job, found, job.conflicts)
    prefix = f"{share_text(job.shared)}: " if job.shared else ""
    backend = job.settings.backends.name
    return _staged(job, f"{prefix}using {backend} as requested", job.shared, backend=backend)


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
    if job.without_staged:
        first = job.without_staged[0]
        fix = "install such a torch (2.8 to 2.10 have no Gloo on Windows)" if job.on_windows else "fix this"
        gloo = if_it_helps(job, ", or use backend='gloo'", backend="gloo")
        raise BackendUnavailableError(
            f"{reason}, but the staged backend cannot be used: {first.where}: {first.staged_missing}. To go on, {fix}{gloo}.",
            ranks=[worker.rank for worker in job.without_staged],
        )
    return _gloo(job, reason, groups, on=on, backend=backend, warnings=warnings)


def gloo_on_devices(job: Job) -> Decision:
    """Choose Gloo, requested by name or by the policy."""
    if job.wants_nccl:
        return _in_place_of_nccl(job, "selected by on_shared_device", job.conflicts)
    prefix = f"{share_text(job.shared)}: " if job.shared else ""
    backend, warnings = job.settings.backends.name, tuple[str, ...]()
    if job.on_windows and job.settings.backends.by_device.get("cuda") == "gloo":
        warnings = (f"{_NO_GLOO_ON_WINDOWS}: backend={backend!r} is kept as requested, 'auto' would use {STAGED}",)
    return _gloo(job, f"{prefix}using {backend} as requested", job.shared, backend=backend, warnings=warnings)


def auto(job: Job) -> Decision:
    """Choose the backend that replaces NCCL for ranks that share devices, with a warning about its cost."""
    why, backend = why_not_nccl(job), _fallback_name(job)
    some_have_nccl = len(job.without_nccl) < len(job.workers)
    warnings = (without_nccl_warning(job, backend),) if some_have_nccl else ()
    return _in_place_of_nccl(job, why, job.conflicts, warnings)


def own_without_nccl(job: Job) -> Decision:
    """Choose the backend that replaces NCCL if every rank has its own device and NCCL is missing on a rank."""
    warnings: tuple[str, ...] = ()
    if job.settings.backends.is_auto and len(job.without_nccl) < len(job.workers):
        warnings = (
            f"torch of {ranks_text(job.without_nccl)} has no NCCL, so all {len(job.workers)} ranks use {_fallback_name(job)}: "
            f"{GLOO_COST}; install the same torch with NCCL on every node",
        )
    return _in_place_of_nccl(job, f"{ranks_text(job.without_nccl)}: torch has no NCCL", warnings=warnings)


def own(job: Job) -> Decision:
    """Choose NCCL if every rank has its own device."""
    name = "nccl" if job.settings.backends.is_auto else job.settings.backends.name
    reason = f"every rank has a device of its own: using {name} (NCCL {versions_text(job.workers)})"
    if not job.siblings:
        fallback = _fallback(job) if job.settings.on_shared_device in ("auto", "gloo") else None
        return _decided(job, "nccl", reason, fallback=fallback, only_if_refused=True)
    # NCCL's source allows these ranks, but users saw it refuse them (nccl#1716): let the verification decide.
    doubt = f"{job.siblings[0].text}: NCCL {versions_text(job.workers)} may refuse them"
    return _decided(job, "nccl", reason, fallback=_fallback(job), warnings=(doubt,))


def _in_place_of_nccl(
    job: Job, why: str, groups: tuple[ShareGroup, ...] = (), warnings: tuple[str, ...] = ()
) -> Decision:
    """Choose Gloo for workers that train on CUDA devices if no backend was requested; on Windows the staged backend."""
    prefix = f"{share_text(groups)}: " if groups else ""
    if job.on_windows:
        reason = f"{prefix}using staged ({why}; {_NO_GLOO_ON_WINDOWS})"
        return _staged(job, reason, groups, warnings=warnings)
    return _gloo(job, f"{prefix}using gloo ({why})", groups, warnings=warnings)


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
        if worker.network.gloo_missing:
            raise BackendUnavailableError(
                f"{reason}, but {worker.where}: {worker.network.gloo_missing}.", ranks=(worker.rank,)
            )
    without = [worker.rank for worker in job.workers if not worker.gloo_available]
    if without:
        raise BackendUnavailableError(
            f"{reason}, but torch of {ranks_text(without)} was built without Gloo. Install a torch build with Gloo.",
            ranks=without,
        )
    return _decided(job, backend, reason, on=on, groups=groups, train_on_cpu=train_on_cpu, warnings=warnings)


def _fallback_name(job: Job) -> str:
    """Return the name of the backend that replaces NCCL: Gloo, or on Windows staged."""
    return STAGED if job.on_windows else "gloo"


def _fallback(job: Job) -> str | None:
    """Return the fallback of a choice that fails its verification, None if it cannot be used."""
    return None if job.on_windows and job.without_staged else _fallback_name(job)


def _decided(
    job: Job,
    backend: str,
    reason: str,
    *,
    on: str = "cuda",
    groups: tuple[ShareGroup, ...] = (),
    env: Mapping[str, str] | None = None,
    fallback: str | None = None,
    only_if_refused: bool = False,
    train_on_cpu: bool = False,
    warnings: tuple[str, ...] = (),
) -> Decision:
    """Create the decision, with warnings about overridden settings and hints."""
    backend, warnings = _override(job, backend, warnings)
    backends = parse_backend(backend)
    if backends.has_nccl:
        warnings += interface_doubts(job.workers)
    if on not in backends.by_device:
        warnings += (f"backend={backend!r} has no backend for {on} tensors, and the workers train on {on}",)
    hints = device_hints(job, backend, groups, warnings) if on == "cuda" else reservation_hints(job)
    if set(backends.by_device.values()) == {"gloo"}:
        warnings += debug_level_warnings(job)
    return Decision(
        backend=backend,
        device_type=on,
        reason=reason,
        share_groups=groups,
        env_defaults=env or {},
        fallback=fallback,
        only_if_refused=only_if_refused,
        train_on_cpu=train_on_cpu,
        hints=hints,
        warnings=warnings,
    )


def _override(job: Job, backend: str, warnings: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the backend under the user's name for it, or the warnings plus one about the user's setting."""
    asked, settings = job.settings.backends, job.settings
    if not (asked.has_nccl or (asked.has_staged and not job.on_devices and job.asks_for_gpus)):
        return backend, warnings
    if backend == "nccl":
        return asked.name, warnings
    if not job.on_devices:
        return backend, (*warnings, f"backend={settings.backend!r} needs CUDA devices: using gloo")
    if not job.conflicts:
        return backend, (*warnings, f"backend={settings.backend!r} is not available: using {backend}")
    override = f"backend={settings.backend!r} cannot be used as it is: on_shared_device={settings.on_shared_device!r} chose {backend}"
    return backend, (". ".join((override, *warnings)),)
