"""The decision: from the workers and the settings to one backend for the job, as a table of rows.

``ROWS`` at the end is the table: the first row whose condition holds decides. Example: two workers at half a GPU each on a
node with one device, torch with NCCL 2.28.9::

    ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.3: using gloo (NCCL 2.28.9 refuses shared devices)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ray_fracbackend.decide.backends import parse_backend
from ray_fracbackend.decide.device_sharing import ShareGroup, share_text, shared_devices, sharing_ranks
from ray_fracbackend.decide.hints import add_hints
from ray_fracbackend.decide.nccl import (
    MULTI_RANK_ENV,
    NCCL_MULTI_RANK,
    kept_settings,
    mig_siblings,
    multi_rank_env,
    multi_rank_obstacle,
    nccl_conflicts,
    versions_text,
)
from ray_fracbackend.decide.plan import GLOO_COST, StartPlan
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text, version_text
from ray_fracbackend.errors import (
    BackendUnavailableError,
    IncompatibleWorkersError,
    MissingDeviceError,
    SharedDeviceError,
)

# Whether "auto" takes ipc for device memory. To be turned once a recorded run on a GPU has proven it; on_shared_device="ipc"
# does not depend on it.
AUTO_TAKES_DEVICE_IPC = False
# Ray resources of accelerators that Ray starts itself.
_FOREIGN_ACCELERATORS = ("TPU", "HPU", "NPU", "neuron_cores")


@dataclass(frozen=True)
class Job:
    """What the rows ask about. What follows from it is computed once, when a row asks for it.

    Attributes:
        workers: Every rank, in rank order, at least one.
        settings: What the user asked for.
    """

    workers: Sequence[WorkerInfo]
    settings: Settings

    @cached_property
    def wants_nccl(self) -> bool:
        """Whether NCCL is to be used where it can."""
        return self.settings.backends.is_auto or self.settings.backends.has_nccl

    @cached_property
    def asks_for_gpus(self) -> bool:
        """Whether Ray reserved GPUs for any worker."""
        return any(worker.gpu_fraction > 0 for worker in self.workers)

    @cached_property
    def on_windows(self) -> list[int]:
        """Ranks on Windows."""
        return [worker.rank for worker in self.workers if worker.platform == "win32"]

    @cached_property
    def without_cuda(self) -> list[WorkerInfo]:
        """Workers that have no CUDA device although Ray reserved one, or that say why they have none."""
        return [w for w in self.workers if w.cuda_missing is not None or (w.gpu_fraction > 0 and not w.devices)]

    @cached_property
    def without_nccl(self) -> list[int]:
        """Ranks whose torch has no NCCL."""
        return [worker.rank for worker in self.workers if not worker.nccl_available]

    @cached_property
    def shared(self) -> tuple[ShareGroup, ...]:
        """Ranks that share a device."""
        return shared_devices(self.workers)

    @cached_property
    def siblings(self) -> tuple[ShareGroup, ...]:
        """Ranks on different MIG slices of one GPU."""
        return mig_siblings(self.workers)

    @cached_property
    def conflicts(self) -> tuple[ShareGroup, ...]:
        """Ranks that share a device and, where NCCL is wanted, ranks that it would refuse."""
        if not self.wants_nccl or self.without_nccl:
            return self.shared
        found = (*self.shared, *nccl_conflicts(self.workers))
        policy = self.settings.on_shared_device
        asked = policy == "nccl" or (
            policy != "error" and self.siblings and multi_rank_obstacle(self.workers, self.siblings) is None
        )
        if not found and asked and all((w.nccl_version or (0,)) >= NCCL_MULTI_RANK for w in self.workers):
            return (
                self.siblings
            )  # NCCL's source tells them apart; without the flags users saw it refuse them (nccl#1716)
        return found

    @cached_property
    def prohibited(self) -> list[int]:
        """Ranks on a device that no process may use."""
        return [w.rank for w in self.workers if w.devices and w.devices[0].compute_mode == "prohibited"]

    @cached_property
    def exclusive(self) -> ShareGroup | None:
        """The first group that shares a device for one process at a time, without MPS on all of its ranks."""
        for group in self.shared:
            members = [self.workers[rank] for rank in group.ranks]
            # Any rank's: without NVML one of them may not know it.
            exclusive = any(member.devices[0].compute_mode == "exclusive_process" for member in members)
            if exclusive and not all(member.mps_reachable for member in members):
                return group
        return None

    @cached_property
    def ipc_obstacle(self) -> str | None:
        """Why the ipc backend cannot use device memory for these workers, None where it can."""
        for group in self.conflicts:
            if not group.same_device:
                return f"{group.text}, and slices cannot map each other's memory"
        for worker in self.workers:
            if worker.ipc_device_memory_missing:
                return f"{worker.where}: {worker.ipc_device_memory_missing}"
        return None

    @cached_property
    def found_without_cuda(self) -> str:
        """Who has no CUDA device and why, in one line."""
        ranks = [worker.rank for worker in self.without_cuda]
        causes = dict.fromkeys(
            f"node {w.node_ip}: {w.cuda_missing or 'no CUDA device was found'}" for w in self.without_cuda
        )
        return f"Ray gave {ranks_text(ranks)} GPUs that torch cannot use ({'; '.join(list(causes)[:4])})"


@dataclass(frozen=True)
class Row:
    """One row of the decision.

    Attributes:
        case: When it decides, in markdown, where none of the rows before it did.
        result: What it comes to, in markdown.
        outcomes: Every backend that it can come to, ``error``, or ``ray`` for a start that is Ray Train's own.
        applies: The condition.
        decide: Makes the plan, or raises the error; None for a start that is Ray Train's own.
        note: More about the result, for the table in the docs.
    """

    case: str
    result: str
    outcomes: tuple[str, ...]
    applies: Callable[[Job], bool]
    decide: Callable[[Job], StartPlan] | None
    note: str = ""


def left_to_ray(backend: str | None, resources_per_worker: Mapping[str, float]) -> str | None:
    """Tell whether a start is Ray Train's own and stays untouched; asked before any worker is.

    Args:
        backend: The backend that was asked for.
        resources_per_worker: What Ray reserved for each worker.

    Returns:
        Why it is, None where it is ours.
    """
    if not parse_backend(backend).is_ours:
        return f"backend {backend!r} is left to Ray Train"
    for name in _FOREIGN_ACCELERATORS:
        if resources_per_worker.get(name, 0) > 0:
            return f"{name} workers are left to Ray Train"
    return None


def asks_for_ipc(settings: Settings) -> bool:
    """Whether a start with these settings may choose the ipc backend, so that its probe is worth its cost."""
    policy = settings.on_shared_device
    return settings.backends.has_ipc or policy == "ipc" or (policy == "auto" and AUTO_TAKES_DEVICE_IPC)


def plan_start(
    workers: Sequence[WorkerInfo], settings: Settings, node_gpus: Mapping[str, float] | None = None
) -> StartPlan:
    """Decide on the backend and the devices. The outcome does not depend on the order of the ranks.

    Args:
        workers: Every rank, in rank order, at least one.
        settings: What the user asked for.
        node_gpus: GPUs that Ray gives out on each node, by Ray's node id; for hints.

    Returns:
        The plan, with reasons, hints and warnings, and without a rendezvous.

    Raises:
        SharedDeviceError: Devices are shared and ``on_shared_device="error"``, or their compute mode forbids it.
        MissingDeviceError: GPUs were asked for that torch does not have, and ``on_missing_cuda="error"``.
        IncompatibleWorkersError: Mixed NCCL versions where NCCL is needed, or Windows and Linux in one job.
        BackendUnavailableError: The backend that was asked for cannot run on these workers.
    """
    job = Job(workers, settings)
    plan = deciding_row(job).decide(job)  # type: ignore[misc]  # the rows with None were asked before the workers were
    return add_hints(plan, workers, node_gpus or {}) if plan.device_type == "cuda" else plan


def deciding_row(job: Job) -> Row:
    """The first row whose condition holds; the last one holds for every job."""
    return next(row for row in ROWS if row.applies(job))


def _gloo(job: Job, reason: str, groups: tuple[ShareGroup, ...] = (), device_type: str = "cuda") -> StartPlan:
    """Gloo on all workers, or an error where torch was built without it."""
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
    return StartPlan(backend="gloo", device_type=device_type, reason=reason, share_groups=groups)


def _ipc_on_host(job: Job, asked: str) -> StartPlan:
    """The ipc backend on host memory, or an error that names the first worker that cannot."""
    for worker in job.workers:
        if worker.ipc_host_memory_missing:
            raise BackendUnavailableError(
                f"{asked}, but the ipc backend cannot be used: {worker.where}: {worker.ipc_host_memory_missing}. "
                "Fix this, or use backend='gloo'.",
                ranks=(worker.rank,),
            )
    return StartPlan(backend="ipc", device_type="cpu", reason=f"{asked}: using ipc on host memory")


def _ipc_on_device(job: Job, asked: str) -> StartPlan:
    """The ipc backend on device memory, or an error that says why it cannot be used."""
    if job.ipc_obstacle:
        raise BackendUnavailableError(
            f"{asked}, but the ipc backend cannot be used: {job.ipc_obstacle}. Fix this, or use on_shared_device='gloo'."
        )
    groups = job.conflicts
    prefix = f"{share_text(groups)}: " if groups else ""
    why = _why_not_nccl(job) if groups else "as asked for"
    return StartPlan(backend="ipc", device_type="cuda", reason=f"{prefix}using ipc ({why})", share_groups=groups)


def _as_asked(job: Job, device_type: str) -> StartPlan:
    backend = job.settings.backends.name
    return StartPlan(backend=backend, device_type=device_type, reason=f"using {backend} as asked for")


def _mixed_systems(job: Job) -> StartPlan:
    raise IncompatibleWorkersError(
        f"Windows under {ranks_text(job.on_windows)}, another system under the others. Gloo cannot connect Windows with other "
        "systems (gloo#386); place all workers on nodes of one system.",
        ranks=job.on_windows,
    )


def _nccl_without_gpus(job: Job) -> StartPlan:
    without = [worker.rank for worker in job.workers if not worker.nccl_available or worker.num_visible_devices == 0]
    if without:
        raise MissingDeviceError(
            f"backend={job.settings.backend!r} for {ranks_text(without)} without a GPU, or with a torch without NCCL. NCCL "
            "works on CUDA devices only; ask for GPUs in ScalingConfig(use_gpu=True), or use backend='auto' or 'gloo'.",
            ranks=without,
        )
    return _as_asked(job, "cuda")


def _gloo_without_gpus(job: Job) -> StartPlan:
    if job.settings.backend not in ("auto", "gloo"):
        return _as_asked(job, "cpu")
    why = "no GPUs were asked for" if job.settings.backend == "auto" else "as asked for"
    return _gloo(job, f"using gloo ({why})", device_type="cpu")


def _asked_without_cuda(job: Job) -> StartPlan:
    backend = job.settings.backends.name
    plan = _gloo(job, f"using {backend} as asked for", device_type="cpu")
    warning = (
        f"{job.found_without_cuda}: {backend} starts all the same, as with TorchConfig, and a train function that uses "
        "ray.train.torch.get_device() will fail; on_missing_cuda='cpu' trains on the CPU"
    )
    return replace(plan, backend=backend, warnings=(warning,))


def _error_without_cuda(job: Job) -> StartPlan:
    raise MissingDeviceError(
        f"{job.found_without_cuda}. Every GPU worker needs a CUDA device; correct num_gpus of those nodes or their torch and "
        "driver, or set FracTorchConfig(on_missing_cuda='cpu') to train on the CPU.",
        ranks=[worker.rank for worker in job.without_cuda],
    )


def _cpu_with_ipc(job: Job) -> StartPlan:
    return replace(_ipc_on_host(job, f"{job.found_without_cuda}: training on the CPU"), train_on_cpu=True)


def _cpu_with_gloo(job: Job) -> StartPlan:
    plan = _gloo(job, f"{job.found_without_cuda}: training on the CPU with gloo", device_type="cpu")
    plan = replace(plan, train_on_cpu=True)
    if job.settings.backend not in ("auto", "gloo"):
        plan = replace(plan, warnings=(f"backend={job.settings.backend!r} needs CUDA devices: using gloo",))
    return plan


def _prohibited(job: Job) -> StartPlan:
    raise MissingDeviceError(
        f"the device of {ranks_text(job.prohibited)} is in compute mode PROHIBITED, which lets no process use it. "
        "Run `nvidia-smi -c DEFAULT` on that node.",
        ranks=job.prohibited,
    )


def _exclusive(job: Job) -> StartPlan:
    group = job.exclusive
    assert group is not None  # the condition of its row
    raise SharedDeviceError(
        f"{group.text}, which is in compute mode EXCLUSIVE_PROCESS: one process at a time without MPS. Run "
        "`nvidia-smi -c DEFAULT` on that node, or start the MPS daemon (`nvidia-cuda-mps-control -d`).",
        ranks=group.ranks,
    )


def _shared_error(job: Job) -> StartPlan:
    raise SharedDeviceError(
        f"{share_text(job.conflicts)}, and on_shared_device='error' forbids it. Ask for a whole GPU a worker or for fewer "
        "workers, or set on_shared_device to 'auto' or 'gloo'.",
        ranks=sharing_ranks(job.conflicts),
    )


def _asked_on_devices(job: Job) -> StartPlan:
    prefix = f"{share_text(job.shared)}: " if job.shared else ""
    backend = job.settings.backends.name
    return replace(_gloo(job, f"{prefix}using {backend} as asked for", job.shared), backend=backend)


def _multi_rank(job: Job, asked: str) -> StartPlan:
    """NCCL's own flags for several ranks on one GPU (NCCL env.rst, since 2.30, experimental)."""
    workers, groups = job.workers, job.conflicts
    old = [
        w.rank for w in workers if not w.nccl_available or w.nccl_version is None or w.nccl_version < NCCL_MULTI_RANK
    ]
    if old:
        raise BackendUnavailableError(
            f"{asked} with NCCL {versions_text([workers[rank] for rank in old])} ({ranks_text(old)}). Several "
            "ranks on one GPU need NCCL 2.30 or newer; install a newer nvidia-nccl package or use on_shared_device='auto'.",
            ranks=old,
        )
    if len(_nccl_versions(job)) > 1:
        _mixed_nccl(job)
    fullest = max(len(group.ranks) for group in groups)
    env = multi_rank_env(fullest, len({worker.node_id for worker in workers}) > 1)
    warnings = tuple(f"{setting} was set by the user and is kept" for setting in kept_settings(workers, env))
    reason = f"{share_text(groups)}: using nccl with several ranks a GPU ({asked}, NCCL {versions_text(workers)})"
    return StartPlan(
        backend="nccl", device_type="cuda", reason=reason, share_groups=groups, env_defaults=env, warnings=warnings
    )


def _shared_nccl(job: Job) -> StartPlan:
    return _override(job, _multi_rank(job, "on_shared_device='nccl'"))


def _shared_nccl_by_user(job: Job) -> StartPlan:
    plan, policy = _multi_rank(job, f"{MULTI_RANK_ENV}=1 is set"), job.settings.on_shared_device
    if policy in ("auto", "gloo"):
        plan = replace(plan, fallback="gloo")
    if policy != "auto":
        override = f"on_shared_device={policy!r} does not count: the user's {MULTI_RANK_ENV}=1 asks for nccl"
        plan = replace(plan, warnings=(*plan.warnings, override))
    return _override(job, plan)


def _shared_ipc(job: Job) -> StartPlan:
    plan = _ipc_on_device(job, f"on_shared_device={job.settings.on_shared_device!r}")
    return _override(job, replace(plan, fallback="gloo" if job.settings.on_shared_device == "auto" else None))


def _shared_gloo(job: Job) -> StartPlan:
    return _override(
        job, _gloo(job, f"{share_text(job.conflicts)}: using gloo (as on_shared_device says)", job.conflicts)
    )


def _shared_auto(job: Job) -> StartPlan:
    why = _why_not_nccl(job)
    plan = _gloo(job, f"{share_text(job.conflicts)}: using gloo ({why})", job.conflicts)
    if len(job.without_nccl) < len(job.workers):
        plan = replace(plan, warnings=(_gloo_warning(job, why),))
    return _override(job, plan)


def _override(job: Job, plan: StartPlan) -> StartPlan:
    """The plan where NCCL was asked for by name: as asked, or with a warning that names the override."""
    if job.settings.backends.is_auto:
        return plan
    if plan.backend == "nccl":
        return replace(plan, backend=job.settings.backends.name)
    override = (
        f"backend={job.settings.backend!r} cannot be used as it is: on_shared_device={job.settings.on_shared_device!r} chose "
        f"{plan.backend}"
    )
    return replace(plan, warnings=(". ".join((override, *plan.warnings)),))


def _why_not_nccl(job: Job) -> str:
    if job.without_nccl:
        every = len(job.without_nccl) == len(job.workers)
        return "torch has no NCCL" if every else f"torch of {ranks_text(job.without_nccl)} has no NCCL"
    version = versions_text(job.workers)
    if not any(group.same_device for group in job.conflicts):
        return f"NCCL {version} compares PCI bus ids and refuses them"
    # One group that NCCL sees is refused at once, whatever becomes of the others.
    seen = any(len({job.workers[rank].nccl_host for rank in group.ranks}) < len(group.ranks) for group in job.conflicts)
    if not seen:
        return f"NCCL {version} does not see it across host names and can hang"
    return f"NCCL {version} refuses shared devices"


def _gloo_warning(job: Job, why: str) -> str:
    """What it costs that Gloo takes the place of NCCL, and what to do."""
    groups, ranks = job.conflicts, sharing_ranks(job.conflicts)
    found = (
        f"{len(ranks)} of {len(job.workers)} ranks share a GPU ({share_text(groups)}), so all ranks use gloo instead of nccl "
        f"({why}): {GLOO_COST}."
    )
    accept = "on_shared_device='gloo' accepts this without a warning, 'error' refuses such a start"
    if not any(group.same_device for group in groups):
        return f"{found} NCCL 2.30.7 or newer takes MIG slices for the different devices that they are; {accept}."
    if all(job.workers[rank].gpu_fraction >= 1 for rank in ranks):
        return (
            f"{found} Each of them asked for a whole GPU: this is how the cluster hands out GPUs (time-slicing in Kubernetes, "
            "containers or Ray nodes with one GPU in common, --num-gpus above what is there). Give every Ray node GPUs of its "
            f"own, or leave those nodes out; {accept}."
        )
    return f"{found} Ask for more than half a GPU per worker where Ray has as many GPUs as workers (`ray status`); {accept}."


def _own_without_nccl(job: Job) -> StartPlan:
    plan = _gloo(job, f"using gloo ({ranks_text(job.without_nccl)}: torch has no NCCL)")
    if not job.settings.backends.is_auto:
        return replace(plan, warnings=(f"backend={job.settings.backend!r} is not available: using gloo",))
    if len(job.without_nccl) < len(job.workers):
        warning = (
            f"torch of {ranks_text(job.without_nccl)} has no NCCL, so all {len(job.workers)} ranks use gloo: {GLOO_COST}; "
            "install the same torch with NCCL on every node"
        )
        return replace(plan, warnings=(warning,))
    return plan


def _nccl_versions(job: Job) -> set[tuple[int, int, int] | None]:
    return {worker.nccl_version for worker in job.workers}


def _mixed_nccl(job: Job) -> StartPlan:
    ranks_by_version = {
        version_text(version): [worker.rank for worker in job.workers if worker.nccl_version == version]
        for version in _nccl_versions(job)
    }
    listed = "; ".join(f"{ranks_text(ranks)}: {version}" for version, ranks in sorted(ranks_by_version.items()))
    raise IncompatibleWorkersError(
        f"the workers loaded different NCCL versions ({listed}). NCCL needs one version on all ranks; install the same "
        "torch and nvidia-nccl packages on every node, or use backend='gloo'."
    )


def _own_nccl(job: Job) -> StartPlan:
    backend = "nccl" if job.settings.backends.is_auto else job.settings.backends.name
    reason = f"every rank has a device of its own: using {backend} (NCCL {versions_text(job.workers)})"
    return StartPlan(backend=backend, device_type="cuda", reason=reason)


def _own_slices(job: Job) -> StartPlan:
    # NCCL's source allows these, users saw it refuse them (nccl#1716): let the verification decide.
    doubt = f"{job.siblings[0].text}: NCCL {versions_text(job.workers)} may refuse them"
    return replace(_own_nccl(job), fallback="gloo", warnings=(doubt,))


def _policy(job: Job, policy: str) -> bool:
    """Devices are shared, and the setting says this of it."""
    return bool(job.conflicts) and job.settings.on_shared_device == policy


def _cpu_asks_for_ipc(settings: Settings) -> bool:
    return settings.backends.has_ipc or (settings.backends.is_auto and settings.on_shared_device == "ipc")


_NOT_NCCL = 'With `backend="nccl"` or a pair with it, a warning names the override.'

ROWS = (
    Row(
        "a backend of [another name](#whose-backend), or `TPU`, `HPU`, `NPU` or `neuron_cores` workers",
        "Ray's own start, untouched",
        ("ray",),
        lambda job: left_to_ray(job.settings.backend, job.workers[0].resources) is not None,
        None,
        "Decided before the workers are probed: no verification, no report.",
    ),
    Row(
        "Windows and other systems in one job",
        "`IncompatibleWorkersError`",
        ("error",),
        lambda job: 0 < len(job.on_windows) < len(job.workers),
        _mixed_systems,
        "CPU jobs included: Gloo cannot connect them.",
    ),
    Row(
        'no GPU asked for, `backend="ipc"`',
        "ipc on host memory",
        ("ipc", "error"),
        lambda job: not job.asks_for_gpus and job.settings.backends.has_ipc,
        lambda job: _ipc_on_host(job, "backend='ipc'"),
        "Or `BackendUnavailableError` where a rank cannot use it.",
    ),
    Row(
        'no GPU asked for, `backend="nccl"` or a pair with it',
        "as asked for",
        ("nccl", "error"),
        lambda job: not job.asks_for_gpus and job.settings.backends.has_nccl,
        _nccl_without_gpus,
        "`MissingDeviceError` where a rank has no visible GPU or no NCCL.",
    ),
    Row(
        "no GPU asked for",
        "gloo",
        ("gloo",),
        lambda job: not job.asks_for_gpus,
        _gloo_without_gpus,
    ),
    Row(
        'torch of a worker has no CUDA, `on_missing_cuda="error"`, `backend="gloo"` or a pair without NCCL',
        "as asked for, with a warning",
        ("gloo",),
        lambda job: (
            bool(job.without_cuda)
            and job.settings.on_missing_cuda == "error"
            and not (job.wants_nccl or job.settings.backends.has_ipc)
        ),
        _asked_without_cuda,
        "As with stock; `get_device()` is left to Ray.",
    ),
    Row(
        'torch of a worker has no CUDA, `on_missing_cuda="error"`',
        "`MissingDeviceError`",
        ("error",),
        lambda job: bool(job.without_cuda) and job.settings.on_missing_cuda == "error",
        _error_without_cuda,
        "With node and [cause](#causes-of-missing-cuda).",
    ),
    Row(
        "torch of a worker has no CUDA, ipc asked for",
        "ipc on host memory, training on the CPU",
        ("ipc", "error"),
        lambda job: bool(job.without_cuda) and _cpu_asks_for_ipc(job.settings),
        _cpu_with_ipc,
        '`on_missing_cuda="cpu"` from here on: the whole job trains on the CPU, and `get_device()` says cpu.',
    ),
    Row(
        "torch of a worker has no CUDA",
        "gloo, training on the CPU",
        ("gloo",),
        lambda job: bool(job.without_cuda),
        _cpu_with_gloo,
        'With `backend="nccl"` or a pair with it, a warning.',
    ),
    Row(
        "compute mode PROHIBITED on a worker's device",
        "`MissingDeviceError`",
        ("error",),
        lambda job: bool(job.prohibited),
        _prohibited,
    ),
    Row(
        "EXCLUSIVE_PROCESS on a shared device, and MPS not reachable from all its ranks",
        "`SharedDeviceError`",
        ("error",),
        lambda job: job.exclusive is not None,
        _exclusive,
    ),
    Row(
        'devices shared, `on_shared_device="error"`',
        "`SharedDeviceError`",
        ("error",),
        lambda job: _policy(job, "error"),
        _shared_error,
        "With the share map. [Shared](#what-counts-as-shared) from here on: by one device, or, where NCCL is wanted, also what "
        "NCCL would refuse.",
    ),
    Row(
        '`backend="ipc"`',
        "ipc on device memory",
        ("ipc", "error"),
        lambda job: job.settings.backends.has_ipc,
        lambda job: _ipc_on_device(job, "backend='ipc'"),
        "Or `BackendUnavailableError` with the reason; slices of one GPU cannot use it. What only several processes can find out "
        "is found out by the group itself, at its first call with CUDA tensors: those then go through Gloo, with a warning.",
    ),
    Row(
        '`backend="gloo"`, or a pair without NCCL',
        "as asked for",
        ("gloo",),
        lambda job: not job.wants_nccl,
        _asked_on_devices,
        "On shared devices too.",
    ),
    Row(
        'devices shared, `on_shared_device="nccl"`',
        "nccl with [flags](#variables-for-several-ranks-a-gpu)",
        ("nccl", "error"),
        lambda job: _policy(job, "nccl"),
        _shared_nccl,
        "NCCL 2.30 or newer, one version; else `BackendUnavailableError` or `IncompatibleWorkersError`.",
    ),
    Row(
        "devices shared, `NCCL_MULTI_RANK_GPU_ENABLE=1` set by the user",
        "nccl with the same flags",
        ("nccl",),
        lambda job: bool(job.conflicts) and multi_rank_obstacle(job.workers, job.conflicts) is None,
        _shared_nccl_by_user,
        'On all ranks that share, with one NCCL of 2.30 or newer on all workers. With gloo as fallback under `"auto"` and `"gloo"`, '
        "and a warning where it overrides a policy.",
    ),
    Row(
        'devices shared, `on_shared_device="ipc"`',
        "ipc on device memory",
        ("ipc", "error"),
        lambda job: _policy(job, "ipc"),
        _shared_ipc,
        f'As with `backend="ipc"`. {_NOT_NCCL}',
    ),
    Row(
        'devices shared, `"auto"`, and ipc proven on GPUs',
        "ipc on device memory",
        ("ipc",),
        lambda job: _policy(job, "auto") and AUTO_TAKES_DEVICE_IPC and job.ipc_obstacle is None,
        _shared_ipc,
        f"Off (`AUTO_TAKES_DEVICE_IPC`) until a recorded run on a GPU has proven it. Gloo as fallback. {_NOT_NCCL}",
    ),
    Row(
        'devices shared, `"gloo"`',
        "gloo",
        ("gloo",),
        lambda job: _policy(job, "gloo"),
        _shared_gloo,
        _NOT_NCCL,
    ),
    Row(
        'devices shared, `"auto"`',
        "gloo, with a warning",
        ("gloo",),
        lambda job: bool(job.conflicts),
        _shared_auto,
        f"The warning says [what it costs](#what-gloo-costs). {_NOT_NCCL}",
    ),
    Row(
        "own devices, torch of a worker has no NCCL",
        "gloo",
        ("gloo",),
        lambda job: bool(job.without_nccl),
        _own_without_nccl,
        'A warning where other ranks have it, and where `backend="nccl"` is overridden.',
    ),
    Row(
        "own devices, mixed NCCL versions",
        "`IncompatibleWorkersError`",
        ("error",),
        lambda job: len(_nccl_versions(job)) > 1,
        _mixed_nccl,
    ),
    Row(
        "own devices, MIG slices of one GPU among them",
        "nccl, with a warning",
        ("nccl",),
        lambda job: bool(job.siblings),
        _own_slices,
        "Gloo as fallback. See [MIG and containers](#mig-and-containers).",
    ),
    Row(
        "own devices",
        "nccl, environment as in stock Ray",
        ("nccl",),
        lambda job: True,
        _own_nccl,
    ),
)
