"""The decision: from the workers and the settings to one backend for the job, as a table of rows.

``ROWS`` is the table, in the order of this file: the first row whose condition holds decides. Example: two workers at half a GPU each on a
node with one device, torch with NCCL 2.28.9::

    ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.3: using gloo (NCCL 2.28.9 refuses shared devices)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ray_fracbackend.decide.backends import STAGED, parse_backend, similar_backend
from ray_fracbackend.decide.device_sharing import ShareGroup, share_text, shared_devices, sharing_ranks
from ray_fracbackend.decide.hints import add_hints
from ray_fracbackend.decide.nccl import (
    MULTI_RANK_ENV,
    NCCL_MULTI_RANK,
    interface_doubts,
    kept_settings,
    mig_siblings,
    multi_rank_env,
    multi_rank_obstacle,
    nccl_conflicts,
    nvls_demanded,
    versions_text,
)
from ray_fracbackend.decide.plan import GLOO_COST, StartPlan
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.worker_info import WorkerInfo, ranks_text, version_text
from ray_fracbackend.errors import (
    BackendUnavailableError,
    FracBackendError,
    IncompatibleWorkersError,
    MissingDeviceError,
    SharedDeviceError,
)

# Whether "auto" takes ipc for device memory. To be turned once a recorded run on a GPU has proven it; on_shared_device="ipc"
# does not depend on it.
AUTO_TAKES_DEVICE_IPC = False
# The same for staged instead of Gloo, where Gloo has CUDA tensors at all; on_shared_device="staged" does not depend on it.
AUTO_TAKES_STAGED = False
# Why Gloo never gets a CUDA tensor on Windows, unless the user names it.
_NO_GLOO_ON_WINDOWS = "on Windows an all_reduce of CUDA tensors through Gloo ends the process (pytorch#186535)"
# Ray resources of accelerators that Ray starts itself.
_FOREIGN_ACCELERATORS = ("TPU", "HPU", "NPU", "neuron_cores")


@dataclass(frozen=True)
class Job:
    """What the rows ask about. What follows from it is computed once, when a row asks for it.

    Attributes:
        workers: Every rank, in rank order, at least one.
        settings: What the user asked for.
        is_asked: It is the job of a user, and not one that asks whether an advice would help.
    """

    workers: Sequence[WorkerInfo]
    settings: Settings
    is_asked: bool = True

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
    def without_staged(self) -> list[WorkerInfo]:
        """Workers that cannot use the staged backend."""
        return [worker for worker in self.workers if worker.staged_missing]

    @cached_property
    def device_memory_obstacle(self) -> str | None:
        """Why the ipc backend cannot use device memory for these workers, None where it can."""
        for group in self.conflicts:
            if not group.same_device:
                return f"{group.text}, and slices cannot map each other's memory"
        num_devices = len({worker.devices[0].uuid for worker in self.workers if worker.devices})
        if num_devices > 1:
            return f"the workers are on {num_devices} devices, and device memory serves only a group on one"
        for worker in self.workers:
            if worker.ipc_device_memory_missing:
                return f"{worker.where}: {worker.ipc_device_memory_missing}"
        return None

    def advice(self, text: str, **settings: str) -> str:
        """Return the text where the start would go through with these settings in place of the user's, else nothing."""
        if not self.is_asked:
            return ""
        changed = copy.copy(self.settings)
        for name, value in settings.items():
            setattr(changed, name, value)
        other = Job(self.workers, changed, is_asked=False)
        try:
            plan = deciding_row(other).decide(other)  # type: ignore[misc]  # the rows with None were asked before
        except FracBackendError:
            return ""
        dies = bool(self.on_windows) and plan.device_type == "cuda" and plan.backends.by_device.get("cuda") == "gloo"
        return "" if dies else text

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
        applies: The condition.
        decide: Makes the plan, or raises the error; its name is the row's, its docstring the result, in markdown. None for a
            start that is Ray Train's own, which is asked before the workers are.
    """

    case: str
    applies: Callable[[Job], bool]
    decide: Callable[[Job], StartPlan] | None

    @property
    def result(self) -> str:
        """What it comes to, in markdown."""
        if self.decide is None:
            return "Ray's own start, untouched. Decided before the workers are probed: no verification, no report."
        return " ".join((self.decide.__doc__ or "").split())


ROWS = [
    Row(
        "a backend of [another name](#whose-backend), or `TPU`, `HPU`, `NPU` or `neuron_cores` workers",
        lambda job: left_to_ray(job.settings.backend, job.workers[0].resources) is not None,
        None,
    )
]


def _row(
    case: str, applies: Callable[[Job], bool]
) -> Callable[[Callable[[Job], StartPlan]], Callable[[Job], StartPlan]]:
    """Make a function the next row of the table."""

    def add(decide: Callable[[Job], StartPlan]) -> Callable[[Job], StartPlan]:
        ROWS.append(Row(case, applies, decide))
        return decide

    return add


@dataclass(frozen=True)
class LeftToRay:
    """A start that is Ray Train's own.

    Attributes:
        reason: Why it is, for a message.
        is_slip: The backend's name is most likely one of ours with a slip, which torch refuses later and less clearly.
    """

    reason: str
    is_slip: bool = False


def left_to_ray(backend: str | None, resources_per_worker: Mapping[str, float]) -> LeftToRay | None:
    """Tell whether a start is Ray Train's own and stays untouched; asked before any worker is.

    Args:
        backend: The backend that was asked for.
        resources_per_worker: What Ray reserved for each worker.

    Returns:
        Why it is, None where it is ours.
    """
    if not parse_backend(backend).is_ours:
        similar = similar_backend(parse_backend(backend).name)
        hint = f" (did you mean {similar!r}?)" if similar else ""
        return LeftToRay(f"backend {backend!r} is left to Ray Train{hint}", is_slip=similar is not None)
    for name in _FOREIGN_ACCELERATORS:
        if resources_per_worker.get(name, 0) > 0:
            return LeftToRay(f"{name} workers are left to Ray Train")
    return None


def asks_for_ipc(settings: Settings) -> bool:
    """Whether a start with these settings may choose the backends ipc or staged, so that their probe is worth its cost."""
    policy, backends = settings.on_shared_device, settings.backends
    by_auto = policy == "auto" and (AUTO_TAKES_DEVICE_IPC or AUTO_TAKES_STAGED)
    return backends.has_ipc or backends.has_staged or policy in ("ipc", "staged") or by_auto


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
    if plan.backends.has_nccl:
        plan = replace(plan, warnings=(*plan.warnings, *interface_doubts(workers)))
    if plan.device_type not in plan.backends.by_device:
        lacks = f"backend={plan.backend!r} is for no {plan.device_type} tensors, and the workers train on {plan.device_type}"
        plan = replace(plan, warnings=(*plan.warnings, lacks))
    return add_hints(plan, workers, node_gpus or {}) if plan.device_type == "cuda" else plan


def deciding_row(job: Job) -> Row:
    """The first row whose condition holds; the last one holds for every job."""
    return next(row for row in ROWS if row.applies(job))


def _gloo(
    job: Job, reason: str, groups: tuple[ShareGroup, ...] = (), device_type: str = "cuda", backend: str = "gloo"
) -> StartPlan:
    """Gloo on all workers, alone or in a pair, or an error where torch was built without it."""
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
    return StartPlan(backend=backend, device_type=device_type, reason=reason, share_groups=groups)


def _gloo_on_devices(job: Job, why: str, groups: tuple[ShareGroup, ...] = ()) -> StartPlan:
    """Gloo on workers that train on CUDA devices, as nobody named it; on Windows the staged backend in its place."""
    prefix = f"{share_text(groups)}: " if groups else ""
    if job.on_windows:
        return _staged(job, f"{prefix}using staged ({why}; {_NO_GLOO_ON_WINDOWS})", groups)
    return _gloo(job, f"{prefix}using gloo ({why})", groups)


def _staged(
    job: Job, reason: str, groups: tuple[ShareGroup, ...] = (), device_type: str = "cuda", backend: str = STAGED
) -> StartPlan:
    """The staged backend, or an error that names the first worker that cannot."""
    if job.without_staged:
        first = job.without_staged[0]
        fix = "install such a torch (2.8 to 2.10 have no Gloo on Windows)" if job.on_windows else "fix this"
        gloo = job.advice(", or use backend='gloo'", backend="gloo")
        raise BackendUnavailableError(
            f"{reason}, but the staged backend cannot be used: {first.where}: {first.staged_missing}. To go on, {fix}{gloo}.",
            ranks=[worker.rank for worker in job.without_staged],
        )
    return _gloo(job, reason, groups, device_type, backend)


def _fallback(job: Job) -> str | None:
    """What takes the place of a choice that fails its verification: Gloo, or on Windows staged, if it can."""
    if job.on_windows:
        return None if job.without_staged else STAGED
    return "gloo"


def _ipc(job: Job, asked: str, device_type: str) -> StartPlan:
    """The ipc backend, or an error that names the first worker that cannot share host memory."""
    for worker in job.workers:
        if worker.ipc_host_memory_missing:
            instead = job.advice(", or use backend='auto'", backend="auto") or job.advice(
                ", or use on_shared_device='auto'", on_shared_device="auto"
            )
            raise BackendUnavailableError(
                f"{asked}, but the ipc backend cannot be used: {worker.where}: {worker.ipc_host_memory_missing}. "
                f"Fix this{instead}.",
                ranks=(worker.rank,),
            )
    if device_type == "cpu":
        return StartPlan(backend="ipc", device_type="cpu", reason=f"{asked}: using ipc on host memory")
    groups = job.conflicts
    prefix = f"{share_text(groups)}: " if groups else ""
    why = _why_not_nccl(job) if "auto" in asked else "as asked for"
    plan = StartPlan(backend="ipc", device_type="cuda", reason=f"{prefix}using ipc ({why})", share_groups=groups)
    if job.device_memory_obstacle is None:
        return plan
    staged = (
        f"ipc stages CUDA tensors through host memory, as it cannot share device memory ({job.device_memory_obstacle})"
    )
    return replace(plan, warnings=(staged,))


def _multi_rank(job: Job, asked: str) -> StartPlan:
    """NCCL's own flags for several ranks on one GPU (NCCL env.rst, since 2.30, experimental)."""
    workers, groups = job.workers, job.conflicts
    old = [
        w.rank for w in workers if not w.nccl_available or w.nccl_version is None or w.nccl_version < NCCL_MULTI_RANK
    ]
    if old:
        auto = job.advice(" or use on_shared_device='auto'", on_shared_device="auto")
        raise BackendUnavailableError(
            f"{asked} with NCCL {versions_text([workers[rank] for rank in old])} ({ranks_text(old)}). Several "
            f"ranks on one GPU need NCCL 2.30 or newer; install a newer nvidia-nccl package{auto}.",
            ranks=old,
        )
    if len(_nccl_versions(job)) > 1:
        raise _mixed_versions(job)
    if demanded := nvls_demanded(workers):
        auto = ", or use on_shared_device='auto'"
        raise BackendUnavailableError(
            f"{asked}, but {demanded}. Unset it or set it to 0{job.advice(auto, on_shared_device='auto')}.",
            ranks=[worker.rank for worker in workers if worker.env.get("NCCL_NVLS_ENABLE") == "1"],
        )
    fullest = max(len(group.ranks) for group in groups)
    env = multi_rank_env(fullest, len({worker.node_id for worker in workers}) > 1)
    warnings = tuple(f"{setting} was set by the user and is kept" for setting in kept_settings(workers, env))
    reason = f"{share_text(groups)}: using nccl with several ranks per GPU ({asked}, NCCL {versions_text(workers)})"
    return StartPlan(
        backend="nccl", device_type="cuda", reason=reason, share_groups=groups, env_defaults=env, warnings=warnings
    )


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
    can = all(worker.nccl_version and worker.nccl_version >= NCCL_MULTI_RANK for worker in job.workers)
    return f"NCCL {version} refuses shared devices{' by default' if can else ''}"


def _gloo_warning(job: Job, why: str, backend: str) -> str:
    """What it costs that Gloo, or staged on Windows, takes the place of NCCL, and what to do."""
    groups, ranks = job.conflicts, sharing_ranks(job.conflicts)
    found = (
        f"{len(ranks)} of {len(job.workers)} ranks share a GPU ({share_text(groups)}), so all ranks use {backend} instead of "
        f"nccl ({why}): {GLOO_COST}."
    )
    accept = "on_shared_device='gloo' accepts this without a warning, 'error' refuses such a start"
    if not any(group.same_device for group in groups):
        return f"{found} NCCL 2.30.7 or newer takes MIG slices for the different devices that they are; {accept}."
    if all(job.workers[rank].gpu_fraction >= 1 for rank in ranks):
        chosen_early = _chosen_early(job)
        if chosen_early:
            return f"{found} {chosen_early}; {accept}."
        return (
            f"{found} Each of them asked for a whole GPU: this is how the cluster hands out GPUs (time-slicing in Kubernetes, "
            "containers or Ray nodes with one GPU in common, --num-gpus above what is there). Give every Ray node GPUs of its "
            f"own, or leave those nodes out; {accept}."
        )
    return f"{found} Ask for more than half a GPU per worker where Ray has as many GPUs as workers (`ray status`); {accept}."


def _chosen_early(job: Job) -> str | None:
    """Say of whole GPUs that Ray counts as different and CUDA as one that the device was chosen before Ray's variable was set."""
    for group in job.conflicts:
        for node_id in {job.workers[rank].node_id for rank in group.ranks}:
            members = [job.workers[rank] for rank in group.ranks if job.workers[rank].node_id == node_id]
            ids = sorted({",".join(member.gpu_ids) for member in members if member.gpu_ids})
            if len(ids) == len(members) > 1:
                return (
                    f"Ray gave {ranks_text([member.rank for member in members])} the GPUs {' and '.join(ids[:4])} of node "
                    f"{members[0].node_ip}, and in each of these processes CUDA has the same one: it was chosen before Ray set "
                    "CUDA_VISIBLE_DEVICES, or the variable was overwritten. Do not use CUDA at the import of a module or in a "
                    "worker_process_setup_hook, and leave the variable to Ray"
                )
    return None


def _nccl_versions(job: Job) -> set[tuple[int, int, int] | None]:
    return {worker.nccl_version for worker in job.workers}


def _mixed_versions(job: Job) -> IncompatibleWorkersError:
    ranks_by_version = {
        version_text(version): [worker.rank for worker in job.workers if worker.nccl_version == version]
        for version in _nccl_versions(job)
    }
    listed = "; ".join(f"{ranks_text(ranks)}: {version}" for version, ranks in sorted(ranks_by_version.items()))
    gloo = job.advice(", or use backend='gloo'", backend="gloo")
    return IncompatibleWorkersError(
        f"the workers loaded different NCCL versions ({listed}). NCCL needs one version on all ranks; install the same "
        f"torch and nvidia-nccl packages on every node{gloo}."
    )


def _policy(job: Job, policy: str) -> bool:
    """Devices are shared, and the setting says this of it."""
    return bool(job.conflicts) and job.settings.on_shared_device == policy


def _cpu_asks_for_ipc(settings: Settings) -> bool:
    return settings.backends.has_ipc or (settings.backends.is_auto and settings.on_shared_device == "ipc")


# The rows, in the order in which they are asked; the first is above.


@_row("Windows and other systems in one job", lambda job: 0 < len(job.on_windows) < len(job.workers))
def _mixed_systems(job: Job) -> StartPlan:
    """`IncompatibleWorkersError`. CPU jobs included: Gloo cannot connect them."""
    raise IncompatibleWorkersError(
        f"Windows on {ranks_text(job.on_windows)}, Linux or macOS on the others. Gloo cannot connect Windows with other "
        "systems (gloo#386); place all workers on nodes of one system.",
        ranks=job.on_windows,
    )


@_row('no GPU asked for, `backend="ipc"`', lambda job: not job.asks_for_gpus and job.settings.backends.has_ipc)
def _ipc_without_gpus(job: Job) -> StartPlan:
    """ipc on host memory. Or `BackendUnavailableError` where a rank cannot use it."""
    return _ipc(job, "backend='ipc'", "cpu")


@_row(
    'no GPU asked for, `backend="nccl"` or a pair with it',
    lambda job: not job.asks_for_gpus and job.settings.backends.has_nccl,
)
def _nccl_without_gpus(job: Job) -> StartPlan:
    """as asked for. `MissingDeviceError` where a rank has no visible GPU or no NCCL."""
    without = [worker.rank for worker in job.workers if not worker.nccl_available or worker.num_visible_devices == 0]
    if without:
        auto = job.advice(", or use backend='auto' or 'gloo'", backend="auto")
        raise MissingDeviceError(
            f"backend={job.settings.backend!r} for {ranks_text(without)} without a GPU, or with a torch without NCCL. NCCL "
            f"works on CUDA devices only; ask for GPUs in ScalingConfig(use_gpu=True){auto}.",
            ranks=without,
        )
    backend = job.settings.backends.name
    return StartPlan(backend=backend, device_type="cuda", reason=f"using {backend} as asked for")


@_row("no GPU asked for", lambda job: not job.asks_for_gpus)
def _gloo_without_gpus(job: Job) -> StartPlan:
    """gloo. Or staged, or a pair without NCCL, as asked for."""
    if job.settings.backends.is_auto:
        plan = _gloo(job, "using gloo (no GPUs were asked for)", device_type="cpu")
        sees = [worker.rank for worker in job.workers if worker.num_visible_devices > 0]
        hint = (
            f"{ranks_text(sees)} can use GPUs that Ray did not reserve, so that torch.cuda.is_available() is true in the train function: "
            "ScalingConfig(use_gpu=True) reserves them, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1 hides them"
        )
        return replace(plan, hints=(hint,)) if sees else plan
    backend = job.settings.backends.name
    make = _staged if job.settings.backends.has_staged else _gloo
    return make(job, f"using {backend} (as asked for)", device_type="cpu", backend=backend)


@_row(
    'torch of a worker has no CUDA, `on_missing_cuda="error"`, `backend="gloo"` or a pair without NCCL',
    lambda job: (
        bool(job.without_cuda)
        and job.settings.on_missing_cuda == "error"
        and not (job.wants_nccl or job.settings.backends.has_ipc or job.settings.backends.has_staged)
    ),
)
def _asked_without_cuda(job: Job) -> StartPlan:
    """as asked for, with a warning. As with stock; `get_device()` is left to Ray."""
    backend = job.settings.backends.name
    plan = _gloo(job, f"using {backend} as asked for", device_type="cpu", backend=backend)
    warning = (
        f"{job.found_without_cuda}: {backend} starts all the same, as with TorchConfig, and a train function that uses "
        "ray.train.torch.get_device() will fail; on_missing_cuda='cpu' trains on the CPU"
    )
    return replace(plan, warnings=(warning,))


@_row(
    'torch of a worker has no CUDA, `on_missing_cuda="error"`',
    lambda job: bool(job.without_cuda) and job.settings.on_missing_cuda == "error",
)
def _error_without_cuda(job: Job) -> StartPlan:
    """`MissingDeviceError`. With node and [cause](#causes-of-missing-cuda)."""
    on_cpu = job.advice(", or set FracTorchConfig(on_missing_cuda='cpu') to train on the CPU", on_missing_cuda="cpu")
    raise MissingDeviceError(
        f"{job.found_without_cuda}. Every GPU worker needs a CUDA device; correct num_gpus of those nodes or their torch and "
        f"driver{on_cpu}.",
        ranks=[worker.rank for worker in job.without_cuda],
    )


@_row(
    "torch of a worker has no CUDA, ipc asked for",
    lambda job: bool(job.without_cuda) and _cpu_asks_for_ipc(job.settings),
)
def _cpu_with_ipc(job: Job) -> StartPlan:
    """ipc on host memory, training on the CPU. Or `BackendUnavailableError`. `on_missing_cuda="cpu"` from here on: the
    whole job trains on the CPU, and `get_device()` says cpu.
    """
    return replace(_ipc(job, f"{job.found_without_cuda}: training on the CPU", "cpu"), train_on_cpu=True)


@_row("torch of a worker has no CUDA", lambda job: bool(job.without_cuda))
def _cpu_with_gloo(job: Job) -> StartPlan:
    """gloo, training on the CPU. With nccl or staged in `backend`, a warning."""
    plan = _gloo(job, f"{job.found_without_cuda}: training on the CPU with gloo", device_type="cpu")
    plan = replace(plan, train_on_cpu=True)
    if job.settings.backends.has_nccl or job.settings.backends.has_staged:
        plan = replace(plan, warnings=(f"backend={job.settings.backend!r} needs CUDA devices: using gloo",))
    return plan


@_row("compute mode PROHIBITED on a worker's device", lambda job: bool(job.prohibited))
def _prohibited(job: Job) -> StartPlan:
    """`MissingDeviceError`."""
    raise MissingDeviceError(
        f"the device of {ranks_text(job.prohibited)} is in compute mode PROHIBITED, which lets no process use it. "
        "Run `nvidia-smi -c DEFAULT` on that node.",
        ranks=job.prohibited,
    )


@_row(
    "EXCLUSIVE_PROCESS on a shared device, and MPS not reachable from all its ranks",
    lambda job: job.exclusive is not None,
)
def _exclusive(job: Job) -> StartPlan:
    """`SharedDeviceError`."""
    group = job.exclusive
    assert group is not None  # the condition of its row
    raise SharedDeviceError(
        f"{group.text}, which is in compute mode EXCLUSIVE_PROCESS: one process at a time without MPS. Run "
        "`nvidia-smi -c DEFAULT` on that node, or start the MPS daemon (`nvidia-cuda-mps-control -d`).",
        ranks=group.ranks,
    )


@_row('devices shared, `on_shared_device="error"`', lambda job: _policy(job, "error"))
def _shared_error(job: Job) -> StartPlan:
    """`SharedDeviceError`. With the share map. [Shared](#what-counts-as-shared) from here on: by one device, or, where
    NCCL is wanted, also what NCCL would refuse.
    """
    auto = job.advice(", or set on_shared_device to 'auto' or 'gloo'", on_shared_device="auto")
    raise SharedDeviceError(
        f"{share_text(job.conflicts)}, and on_shared_device='error' forbids it. Ask for a whole GPU per worker or for fewer "
        f"workers{auto}.",
        ranks=sharing_ranks(job.conflicts),
    )


@_row('`backend="ipc"`', lambda job: job.settings.backends.has_ipc)
def _ipc_asked(job: Job) -> StartPlan:
    """ipc on device memory. Or `BackendUnavailableError` with the reason. If the ranks cannot share device memory (slices of one
    GPU, for example), CUDA tensors are [staged](#how-cuda-tensors-travel) through host memory, with a warning. Checks that need
    several processes run in the group's first call with CUDA tensors.
    """
    return _ipc(job, "backend='ipc'", "cuda")


@_row('`backend="staged"` or `"cpu:gloo,cuda:staged"`', lambda job: job.settings.backends.has_staged)
def _staged_asked(job: Job) -> StartPlan:
    """staged. Or `BackendUnavailableError` with the reason."""
    prefix = f"{share_text(job.shared)}: " if job.shared else ""
    backend = job.settings.backends.name
    return _staged(job, f"{prefix}using {backend} as asked for", job.shared, backend=backend)


@_row('`backend="gloo"`, or a pair without NCCL', lambda job: not job.wants_nccl)
def _asked_on_devices(job: Job) -> StartPlan:
    """as asked for. On shared devices too. On Windows with a warning, and after a trial in a process that may end."""
    prefix = f"{share_text(job.shared)}: " if job.shared else ""
    backend = job.settings.backends.name
    plan = _gloo(job, f"{prefix}using {backend} as asked for", job.shared, backend=backend)
    if job.on_windows and job.settings.backends.by_device.get("cuda") == "gloo":
        warning = f"{_NO_GLOO_ON_WINDOWS}: backend={backend!r} is kept as asked for, 'auto' would use {STAGED}"
        return replace(plan, warnings=(warning,))
    return plan


@_row('devices shared, `on_shared_device="nccl"`', lambda job: _policy(job, "nccl"))
def _shared_nccl(job: Job) -> StartPlan:
    """nccl with [flags](#variables-for-several-ranks-per-gpu). NCCL 2.30 or newer, one version; else
    `BackendUnavailableError` or `IncompatibleWorkersError`.
    """
    return _override(job, _multi_rank(job, "on_shared_device='nccl'"))


@_row(
    "devices shared, `NCCL_MULTI_RANK_GPU_ENABLE=1` set by the user",
    lambda job: bool(job.conflicts) and multi_rank_obstacle(job.workers, job.conflicts) is None,
)
def _shared_nccl_by_user(job: Job) -> StartPlan:
    """nccl with the same flags. On all ranks that share, with one NCCL of 2.30 or newer on all workers. With gloo as
    fallback under `"auto"` and `"gloo"`, and a warning where it overrides a policy.
    """
    plan, policy = _multi_rank(job, f"{MULTI_RANK_ENV}=1 is set"), job.settings.on_shared_device
    if policy in ("auto", "gloo"):
        plan = replace(plan, fallback=_fallback(job))
    if policy != "auto":
        override = f"on_shared_device={policy!r} does not count: the user's {MULTI_RANK_ENV}=1 asks for nccl"
        plan = replace(plan, warnings=(*plan.warnings, override))
    return _override(job, plan)


@_row('devices shared, `on_shared_device="ipc"`', lambda job: _policy(job, "ipc"))
def _shared_ipc(job: Job) -> StartPlan:
    """ipc on device memory. Or `BackendUnavailableError`, as with `backend="ipc"`. With `backend="nccl"` or a pair with
    it, a warning names the override.
    """
    return _override(job, _ipc(job, "on_shared_device='ipc'", "cuda"))


@_row(
    'devices shared, `"auto"`, and ipc proven on GPUs',
    lambda job: _policy(job, "auto") and AUTO_TAKES_DEVICE_IPC and job.device_memory_obstacle is None,
)
def _shared_ipc_by_auto(job: Job) -> StartPlan:
    """ipc on device memory. Off (`AUTO_TAKES_DEVICE_IPC`) until a recorded run on a GPU has proven it. Gloo as
    fallback. With `backend="nccl"` or a pair with it, a warning names the override.
    """
    return _override(job, replace(_ipc(job, "on_shared_device='auto'", "cuda"), fallback=_fallback(job)))


@_row('devices shared, `on_shared_device="staged"`', lambda job: _policy(job, "staged"))
def _shared_staged(job: Job) -> StartPlan:
    """staged. Or `BackendUnavailableError` with the reason. With `backend="nccl"` or a pair with it, a warning names the
    override.
    """
    found = f"{share_text(job.conflicts)}: using staged (as on_shared_device says)"
    return _override(job, _staged(job, found, job.conflicts))


@_row(
    'devices shared, `"auto"`, and staged proven on GPUs',
    lambda job: _policy(job, "auto") and AUTO_TAKES_STAGED and not (job.without_staged or job.on_windows),
)
def _shared_staged_by_auto(job: Job) -> StartPlan:
    """staged. Off (`AUTO_TAKES_STAGED`) until a recorded run on a GPU has shown it right and faster than Gloo, which is its
    fallback. With `backend="nccl"` or a pair with it, a warning names the override.
    """
    plan = _staged(job, f"{share_text(job.conflicts)}: using staged ({_why_not_nccl(job)})", job.conflicts)
    return _override(job, replace(plan, fallback=_fallback(job)))


@_row('devices shared, `"gloo"`', lambda job: _policy(job, "gloo"))
def _shared_gloo(job: Job) -> StartPlan:
    """gloo; on Windows staged. With `backend="nccl"` or a pair with it, a warning names the override."""
    return _override(job, _gloo_on_devices(job, "as on_shared_device says", job.conflicts))


@_row('devices shared, `"auto"`', lambda job: bool(job.conflicts))
def _shared_auto(job: Job) -> StartPlan:
    """gloo, with a warning; on Windows staged. The warning says [what it costs](#what-gloo-costs). With `backend="nccl"` or
    a pair with it, a warning names the override.
    """
    why = _why_not_nccl(job)
    plan = _gloo_on_devices(job, why, job.conflicts)
    if len(job.without_nccl) < len(job.workers):
        plan = replace(plan, warnings=(_gloo_warning(job, why, plan.backend),))
    return _override(job, plan)


@_row("own devices, torch of a worker has no NCCL", lambda job: bool(job.without_nccl))
def _own_without_nccl(job: Job) -> StartPlan:
    """gloo; on Windows staged. A warning where other ranks have it, and where `backend="nccl"` is overridden."""
    plan = _gloo_on_devices(job, f"{ranks_text(job.without_nccl)}: torch has no NCCL")
    if not job.settings.backends.is_auto:
        return replace(plan, warnings=(f"backend={job.settings.backend!r} is not available: using {plan.backend}",))
    if len(job.without_nccl) < len(job.workers):
        warning = (
            f"torch of {ranks_text(job.without_nccl)} has no NCCL, so all {len(job.workers)} ranks use {plan.backend}: {GLOO_COST}; "
            "install the same torch with NCCL on every node"
        )
        return replace(plan, warnings=(warning,))
    return plan


@_row("own devices, mixed NCCL versions", lambda job: len(_nccl_versions(job)) > 1)
def _mixed_nccl(job: Job) -> StartPlan:
    """`IncompatibleWorkersError`."""
    raise _mixed_versions(job)


@_row("own devices, MIG slices of one GPU among them", lambda job: bool(job.siblings))
def _own_slices(job: Job) -> StartPlan:
    """nccl, with a warning. Gloo as fallback. See [MIG and containers](#mig-and-containers)."""
    # NCCL's source allows these, users saw it refuse them (nccl#1716): let the verification decide.
    doubt = f"{job.siblings[0].text}: NCCL {versions_text(job.workers)} may refuse them"
    return replace(_own_nccl(job), fallback=_fallback(job), only_if_refused=False, warnings=(doubt,))


@_row("own devices", lambda job: True)
def _own_nccl(job: Job) -> StartPlan:
    """nccl, environment as in stock Ray. Where NCCL refuses ranks all the same, Gloo under `"auto"` and `"gloo"`."""
    backend = "nccl" if job.settings.backends.is_auto else job.settings.backends.name
    reason = f"every rank has a device of its own: using {backend} (NCCL {versions_text(job.workers)})"
    fallback = _fallback(job) if job.settings.on_shared_device in ("auto", "gloo") else None
    return StartPlan(backend=backend, device_type="cuda", reason=reason, fallback=fallback, only_if_refused=True)
