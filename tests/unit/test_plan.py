"""Every row of the decision: workers and settings, and the backend, device, fallback and warnings that they get."""

import pytest

from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.left_to_ray import left_to_ray
from ray_fracbackend.decide.plan import FallBack, StartPlan, WorkerPlan
from ray_fracbackend.decide.rendezvous import plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import ROWS, decide_start
from ray_fracbackend.errors import (
    BackendUnavailableError,
    FracBackendError,
    GroupFormationError,
    IncompatibleWorkersError,
    MissingDeviceError,
    OutOfMemoryError,
    SharedDeviceError,
    StartTimeoutError,
    VerificationError,
)
from tests.unit.builders import gpu, job, mig, worker

_NEVER, _REFUSAL, _FAILURE = FallBack
_NO_NCCL = {"nccl_available": False, "nccl_version": None}
_WINDOWS = {"platform": "win32", **_NO_NCCL}
_STAGED, _PAIR = "cpu:gloo,cuda:staged", "cpu:gloo,cuda:nccl"
_NEW, _OLD = {"nccl_version": (2, 30, 7)}, {"nccl_version": (2, 30, 6)}
_SWITCH = {"env": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}
_CPU, _OWN, _SHARED, _SLICES = (None, None), (gpu("a"), gpu("b", index=1)), (gpu(), gpu()), (mig("1"), mig("2"))
_MISSING = {"resources": {"GPU": 1.0}, "cuda_missing": "no driver"}
_ON_CPU = {"on_missing_cuda": "cpu"}
_EXCLUSIVE = gpu(compute_mode="exclusive_process")
_IPC = {"ipc_host_memory_missing": None}
_COST, _OVERRIDE = "ranks share a GPU", "cannot be used here"


def row(name, devices, facts, settings, expected, device="cuda", falls_back=_NEVER, warns=()):
    """Return a case: the row that decides, the backend or the class of the error, and a part of each warning."""
    workers = devices if isinstance(devices, list) else job(*devices, **facts)
    label = f"{name}-{settings or 'auto'}-{len(workers)}x{workers[0].device and workers[0].device.uuid}"
    return pytest.param(name, workers, settings, expected, device, falls_back, warns, id=label)


_CASES = [
    row("mixed systems", [worker(0, platform="win32"), worker(1)], {}, {}, IncompatibleWorkersError),
    row("NCCL without GPUs", _CPU, {}, {"backend": "nccl"}, MissingDeviceError),
    row("NCCL without GPUs", _CPU, {"num_visible_devices": 1}, {"backend": _PAIR}, MissingDeviceError),
    row("NCCL without GPUs", _CPU, {"nccl_available": True}, {"backend": "nccl"}, MissingDeviceError),
    row("missing CUDA", _CPU, _MISSING, {}, MissingDeviceError),
    row("missing CUDA", _CPU, _MISSING, {"backend": "ipc"}, MissingDeviceError),
    row("missing CUDA", _CPU, _MISSING, {"backend": "staged"}, MissingDeviceError),
    row("missing CUDA", _CPU, {"resources": {"GPU": 1.0}}, {"backend": _PAIR}, MissingDeviceError),
    row("missing CUDA", [worker(0, gpu()), worker(1, **_MISSING)], {}, {}, MissingDeviceError),
    row("compute mode", (_EXCLUSIVE, gpu(compute_mode="unknown")), {}, {"backend": "gloo"}, SharedDeviceError),
    row("sharing forbidden", _SHARED, {}, {"on_shared_device": "error"}, SharedDeviceError),
    row("sharing forbidden", _SHARED, {}, {"on_shared_device": "error", "backend": "gloo"}, SharedDeviceError),
    row("sharing forbidden", _SLICES, _OLD, {"on_shared_device": "error"}, SharedDeviceError),
    row("sharing forbidden", _SHARED, _NEW | _SWITCH, {"on_shared_device": "error"}, SharedDeviceError),
    row("mixed NCCL versions", [worker(0, gpu("a")), worker(1, gpu("b"), **_NEW)], {}, {}, IncompatibleWorkersError),
    # No GPUs.
    row("no GPUs", _CPU, {}, {}, "gloo", "cpu"),
    row("no GPUs", _CPU, {"cuda_missing": "no driver"}, {}, "gloo", "cpu"),
    row("no GPUs", _CPU, {}, {"backend": "cpu:gloo,cuda:gloo"}, "cpu:gloo,cuda:gloo", "cpu"),
    row("no GPUs", _CPU, {}, {"backend": "staged"}, "staged", "cpu"),
    row("no GPUs", _CPU, {"staged_missing": "no"}, {"backend": "staged"}, BackendUnavailableError),
    row("no GPUs", _CPU, _IPC, {"backend": "ipc"}, "ipc", "cpu"),
    row("no GPUs", _CPU, {}, {"backend": "ipc"}, BackendUnavailableError),
    row("no GPUs", _CPU, {"gloo_available": False}, {}, BackendUnavailableError),
    row("no GPUs", _CPU, {"nccl_available": True, "num_visible_devices": 1}, {"backend": "nccl"}, "nccl"),
    # GPUs that torch cannot use.
    row("gloo without CUDA", _CPU, _MISSING, {"backend": "gloo"}, "gloo", "cpu", warns=["torch cannot use"]),
    row("training on the CPU", _CPU, _MISSING, _ON_CPU, "gloo", "cpu"),
    row("training on the CPU", [worker(0, gpu()), worker(1, **_MISSING)], {}, _ON_CPU, "gloo", "cpu"),
    row("training on the CPU", _CPU, _MISSING, {"backend": "nccl", **_ON_CPU}, "gloo", "cpu", warns=[_OVERRIDE]),
    row("training on the CPU", _CPU, _MISSING, {"backend": "staged", **_ON_CPU}, "gloo", "cpu", warns=[_OVERRIDE]),
    row("training on the CPU", _CPU, _MISSING, {"backend": "cpu:gloo,cuda:gloo", **_ON_CPU}, "gloo", "cpu"),
    row("training on the CPU", _CPU, _MISSING | _IPC, {"backend": "ipc", **_ON_CPU}, "ipc", "cpu"),
    row("training on the CPU", _CPU, _MISSING | _IPC, {"on_shared_device": "ipc", **_ON_CPU}, "ipc", "cpu"),
    row("training on the CPU", _CPU, _MISSING | _IPC, {"on_shared_device": "gloo", **_ON_CPU}, "gloo", "cpu"),
    row(
        "training on the CPU",
        _CPU,
        _MISSING | _IPC,
        {"on_shared_device": "ipc", "backend": "gloo", **_ON_CPU},
        "gloo",
        "cpu",
    ),
    # NCCL with several ranks per GPU.
    row("several ranks per GPU", _SHARED, _NEW, {"on_shared_device": "nccl"}, "nccl"),
    row("several ranks per GPU", _SHARED, {"nccl_version": (2, 30, 0)}, {"on_shared_device": "nccl"}, "nccl"),
    row("several ranks per GPU", _SHARED, _NEW, {"on_shared_device": "nccl", "backend": _PAIR}, _PAIR),
    row("several ranks per GPU", _SHARED, {}, {"on_shared_device": "nccl"}, BackendUnavailableError),
    row(
        "several ranks per GPU", _SHARED, {"nccl_version": None}, {"on_shared_device": "nccl"}, BackendUnavailableError
    ),
    row("several ranks per GPU", _SHARED, _NO_NCCL, {"on_shared_device": "nccl"}, BackendUnavailableError),
    row(
        "several ranks per GPU",
        [worker(0, gpu(), **_NEW), worker(1, gpu(), nccl_version=(2, 31, 0))],
        {},
        {"on_shared_device": "nccl"},
        IncompatibleWorkersError,
    ),
    row("several ranks per GPU", _SHARED, _NEW | _SWITCH, {}, "nccl", falls_back=_FAILURE),
    row("several ranks per GPU", _SLICES, _NEW, {"on_shared_device": "nccl"}, "nccl"),
    row("several ranks per GPU", _SLICES, _NEW | _SWITCH, {}, "nccl", falls_back=_FAILURE),
    # By name or by policy.
    row("ipc", _SHARED, _IPC, {"backend": "ipc"}, "ipc"),
    row("ipc", _SHARED, _IPC, {"on_shared_device": "ipc"}, "ipc"),
    row("ipc", _SHARED, _IPC | _NEW | _SWITCH, {"on_shared_device": "ipc"}, "ipc"),
    row("ipc", _SHARED, _IPC, {"on_shared_device": "ipc", "backend": "nccl"}, "ipc", warns=[_OVERRIDE]),
    row("ipc", _SHARED, {}, {"on_shared_device": "ipc"}, BackendUnavailableError),
    row("staged", _SHARED, {}, {"on_shared_device": "staged"}, _STAGED),
    row("staged", _SHARED, {}, {"on_shared_device": "staged", "backend": "nccl"}, _STAGED, warns=[_OVERRIDE]),
    row("staged", _SHARED, {"staged_missing": "no"}, {"on_shared_device": "staged"}, BackendUnavailableError),
    row("staged", _OWN, {}, {"backend": "staged"}, "staged"),
    row("staged", _OWN, {}, {"backend": _STAGED}, _STAGED),
    row("gloo", _OWN, {}, {"backend": "gloo"}, "gloo"),
    row("gloo", (_EXCLUSIVE, _EXCLUSIVE), {"mps_reachable": True}, {"backend": "gloo"}, "gloo"),
    row("gloo", _SHARED, {}, {"on_shared_device": "gloo"}, "gloo"),
    row("gloo", _SHARED, {}, {"on_shared_device": "gloo", "backend": "nccl"}, "gloo", warns=[_OVERRIDE]),
    row("gloo", _SHARED, _NEW | _SWITCH, {"on_shared_device": "gloo"}, "gloo"),
    row("gloo", _SHARED, _WINDOWS, {"on_shared_device": "gloo"}, _STAGED),
    row("gloo", _SHARED, _WINDOWS, {"backend": "gloo"}, "gloo", warns=["pytorch#186535"]),
    row("gloo", _OWN, _WINDOWS, {"backend": "cpu:gloo,cuda:gloo"}, "cpu:gloo,cuda:gloo", warns=["pytorch#186535"]),
    # Shared devices, and missing NCCL.
    row("shared", _SHARED, {}, {}, "gloo", warns=[f"2 of 2 {_COST}"]),
    row("shared", (*_SHARED, gpu("b")), {}, {}, "gloo", warns=[f"2 of 3 {_COST}"]),
    row("shared", _SHARED, _NEW, {}, "gloo", warns=[_COST]),
    row("shared", _SHARED, _SWITCH, {}, "gloo", warns=[_COST]),
    row("shared", [worker(0, gpu(), **_NEW | _SWITCH), worker(1, gpu(), **_NEW)], {}, {}, "gloo", warns=[_COST]),
    row("shared", _SHARED, {}, {"backend": _PAIR}, "gloo", warns=[_OVERRIDE, _COST]),
    row("shared", _SLICES, _OLD, {}, "gloo", warns=[_COST]),
    row("shared", _SHARED, _NO_NCCL, {}, "gloo"),
    row("shared", _SHARED, _WINDOWS, {}, _STAGED),
    row("shared", _SHARED, _WINDOWS | {"staged_missing": "no"}, {}, BackendUnavailableError),
    row("no NCCL", [worker(0, gpu("a")), worker(1, gpu("b"), **_NO_NCCL)], {}, {}, "gloo", warns=["rank 1 lacks"]),
    row("no NCCL", _OWN, _NO_NCCL, {"backend": "nccl"}, "gloo", warns=[_OVERRIDE]),
    row("no NCCL", _OWN, _WINDOWS, {}, _STAGED),
    # Own devices.
    row("own devices", _OWN, {}, {}, "nccl", falls_back=_REFUSAL),
    row("own devices", _OWN, {}, {"on_shared_device": "gloo"}, "nccl", falls_back=_REFUSAL),
    row("own devices", _OWN, {}, {"on_shared_device": "error"}, "nccl"),
    row("own devices", _OWN, {}, {"on_shared_device": "nccl", "backend": _PAIR}, _PAIR),
    row("own devices", (_EXCLUSIVE, gpu("b")), {}, {}, "nccl", falls_back=_REFUSAL),
    row(
        "own devices",
        [worker(0, gpu("a")), worker(1, gpu("b"), nccl_version=None)],
        {},
        {},
        "nccl",
        falls_back=_REFUSAL,
    ),
    row("own devices", _OWN, {"env": {"NCCL_SOCKET_IFNAME": "eth9"}}, {}, "nccl", falls_back=_REFUSAL),
    row("own devices", (mig("1", "a"), mig("2", "b")), {}, {}, "nccl", falls_back=_REFUSAL),
    row("own devices", _SLICES, _NEW, {}, "nccl", falls_back=_FAILURE, warns=["may refuse them"]),
]


@pytest.mark.parametrize(("name", "workers", "settings", "expected", "device", "falls_back", "warns"), _CASES)
def test_row(name, workers, settings, expected, device, falls_back, warns):
    """The first row whose condition is true has this name and this outcome; an error names ranks of the job."""
    chosen = Settings(**settings)
    assert next(each.name for each in ROWS if each.applies(Job(workers, chosen))) == name
    if not isinstance(expected, str):
        with pytest.raises(expected) as caught:
            decide_start(workers, chosen)
        assert set(caught.value.ranks) <= set(range(len(workers)))
        return
    found = decide_start(workers, chosen)
    assert (found.backend, found.device_type, found.falls_back) == (expected, device, falls_back)
    assert (found.fallback == "gloo") == (falls_back is not _NEVER)
    assert [text in warning for text, warning in zip(warns, found.warnings, strict=True)] == [True] * len(warns)
    assert found.train_on_cpu == (name == "training on the CPU")
    assert found.hints == ()


def test_every_row_has_a_case():
    """In the order of the rows."""
    assert list(dict.fromkeys(case.values[0] for case in _CASES)) == [each.name for each in ROWS]


def test_reason_and_share_groups():
    """The log line of the README: who shares what, where, and why Gloo."""
    found = decide_start([*job(gpu("ab12cd34-56"), gpu("ab12cd34-56")), worker(2, gpu("b"))], Settings())
    assert found.reason == (
        "ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.1: using gloo (NCCL 2.28.9 refuses shared devices)"
    )
    assert [group.ranks for group in found.share_groups] == [(0, 1)]
    many = decide_start(job(*[gpu(f"{rank // 2}") for rank in range(20)]), Settings())
    assert "and 7 more such groups: using gloo" in many.reason
    containers = [worker(0, gpu()), worker(1, gpu(), node="2", hostname="container2", boot_id="boot1")]
    assert "on nodes 10.0.0.1, 10.0.0.2: using gloo" in decide_start(containers, Settings()).reason


@pytest.mark.parametrize(
    ("workers", "settings", "ranks", "text"),
    [
        (job(gpu(), gpu()), {"on_shared_device": "error"}, (0, 1), "share GPU-a"),
        ([worker(0, gpu()), worker(1, node="2", **_MISSING)], {}, (1,), "node 10.0.0.2: no driver"),
        (job(None, None, resources={"GPU": 1.0}), {}, (0, 1), "no CUDA device was found"),
        (job(gpu(), gpu()), {"on_shared_device": "nccl"}, (0, 1), "NCCL 2.28.9 (ranks 0,1)"),
        ([worker(0, gpu("a")), worker(1, gpu("b"), **_NEW)], {}, (), "rank 0: 2.28.9; rank 1: 2.30.7"),
        ([worker(0, **_IPC), worker(1)], {"backend": "ipc"}, (1,), "rank 1 (node 10.0.0.1, pid 0): no ipc here"),
        ([worker(0), worker(1, platform="win32")], {}, (1,), "Windows on rank 1"),
        ([worker(0), worker(1, gloo_available=False)], {}, (1,), "built without Gloo"),
        (job(None, num_visible_devices=1), {"backend": "nccl"}, (0,), "rank 0 lacks one"),
        (job(_EXCLUSIVE, _EXCLUSIVE), {}, (0, 1), "nvidia-smi -c DEFAULT"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_errors_name_ranks_and_cause(workers, settings, ranks, text):
    """What a program reads and what a person needs."""
    with pytest.raises(FracBackendError) as caught:
        decide_start(workers, Settings(**settings))
    assert caught.value.ranks == ranks
    assert text in str(caught.value)


@pytest.mark.parametrize(("ranks", "ctas"), [(1, None), (2, "4"), (3, "2"), (8, "1"), (16, "1")])
def test_flags_for_several_ranks_per_gpu(ranks, ctas):
    """Multi-rank on, NVLS off, and 8 CTAs divided by the ranks on the fullest device; across nodes no GPU-direct; the user's are kept."""
    settings = Settings(on_shared_device="nccl")
    flags = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": ctas}
    assert decide_start(job(*[gpu()] * ranks, **_NEW), settings).env_defaults == (flags if ctas else {})
    if ctas:
        apart = [*job(*[gpu()] * ranks, **_NEW), worker(ranks, gpu("b"), node="2", **_NEW)]
        assert decide_start(apart, settings).env_defaults == flags | {"NCCL_NET_GDR_LEVEL": "LOC"}
        found = decide_start(job(*[gpu()] * ranks, **_NEW, env={"NCCL_MAX_CTAS": "16"}), settings)
        assert found.warnings == ("NCCL_MAX_CTAS=16 was set by the user and is kept",)


def test_hints():
    """An unused part of a GPU, and a LOCAL_RANK that is another device's index."""
    accepted = Settings(on_shared_device="gloo")
    for fraction, said in [
        (0.4, "2 on a GPU and 0.2 of it stays unused; with 0.3333"),
        (0.6, "and 0.4"),
        (0.22, None),
        (1 / 3, None),
        (1.0, None),
    ]:
        (hint,) = decide_start(job(gpu(), resources={"GPU": fraction}), accepted).hints or [None]
        assert (hint is None) if said is None else (said in hint)
    devices = (gpu("a"), gpu("a"), gpu("b", index=1), gpu("b", index=1))
    (hint,) = decide_start(job(*devices, num_visible_devices=2), accepted).hints
    assert "LOCAL_RANK 1 is not the device of rank 1 on node 10.0.0.1, which is cuda:0" in hint


@pytest.mark.parametrize("backend", ["tpu_dist", "hccl", "mine", "cpu:gloo,xpu:ccl", "npu:gloo", "gpu:nccl"])
def test_other_backends_are_left_to_ray(backend):
    """Names that are not ours; those of the table are."""
    assert left_to_ray(backend, {})
    for ours in ("auto", "nccl", "gloo", "ipc", "staged", _PAIR, "cuda:nccl,cpu:gloo"):
        assert left_to_ray(ours, {"CPU": 1, "GPU": 0.5}) is None


@pytest.mark.parametrize("resource", ["TPU", "HPU", "NPU", "RBLN", "FURIOSA", "TTNPU", "MBLT", "neuron_cores"])
def test_other_accelerators_are_left_to_ray(resource):
    """Also with one of our backends."""
    assert left_to_ray("auto", {"CPU": 1, resource: 1})


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("nccl", "cuda:1", ("cuda:1",)),
        (_PAIR, "cuda:1", ("cpu", "cuda:1")),
        (_STAGED, "cuda:0", ("cpu", "cuda:0")),
        ("gloo", "cuda:0", ("cuda:0",)),
        ("ipc", "cuda:0", ("cuda:0",)),
        ("gloo", "cpu", ("cpu",)),
        # Parts of a pair for a device type that the worker does not use.
        ("cpu:gloo", "cuda:0", ("cpu",)),
        ("cuda:gloo", "cpu", ()),
        (_STAGED, "cpu", ("cpu",)),
        # Ray assigned no device: the script chooses one later.
        ("nccl", "cuda", ()),
        (_PAIR, "cuda", ("cpu",)),
    ],
)
def test_verified_devices(backend, device, expected):
    """One for each backend of the group, the worker's own last; never a device that Ray did not assign."""
    facts = {"rank": 0, "world_size": 2, "master_addr": "127.0.0.1", "master_port": 1, "timeout_s": 9, "budget_s": 9}
    facts |= {"attempt": "first", "backend": backend, "device": device}
    assert WorkerPlan(verify=True, **facts).verify_on == expected
    assert WorkerPlan(verify=False, **facts).verify_on == ()


def worker_plans(workers, **options):
    """Return the plan of each worker."""
    settings = Settings(**options)
    decision = decide_start(workers, settings)
    plan = StartPlan(decision, plan_rendezvous(workers, settings, decision.backend, 29500))
    return plan.worker_plans(workers, settings, budget_s=1.0, attempt="a")


def test_the_group_is_bound_to_devices_of_its_own():
    """After the verification, because a new group splits the communicator that it has connected."""
    own, shared = job(*_OWN, num_visible_devices=2), job(*_SHARED, **_NEW)
    for workers, options, bound in [
        (own, {}, True),
        (own, {"backend": _PAIR}, True),
        (own, {"verify": False}, False),
        (own, {"backend": "gloo"}, False),
        (job(None, None), {}, False),
        (shared, {"on_shared_device": "nccl"}, False),
    ]:
        assert [each.bind_device for each in worker_plans(workers, **options)] == [bound, bound]


def test_device_memory_and_environment_of_a_worker():
    """The device that Ray assigned, the cap on memory, and variables for Accelerate where it cannot detect the situation itself."""
    shared = worker_plans(job(*_SHARED), limit_gpu_memory=True)[1]
    assert (shared.device, shared.memory_fraction, shared.train_on_cpu) == ("cuda:0", 0.5, False)
    assert shared.env_defaults == {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    own = worker_plans(job(*_OWN, resources={"GPU": 1.0}), limit_gpu_memory=True)[1]
    assert (own.device, own.memory_fraction, own.env_defaults) == ("cuda:1", None, {})
    assert worker_plans(job(*_SHARED))[0].memory_fraction is None
    on_cpu = worker_plans(job(None, None, **_MISSING | {"resources": {"GPU": 0.5}}), limit_gpu_memory=True, **_ON_CPU)[
        1
    ]
    assert (on_cpu.device, on_cpu.memory_fraction, on_cpu.train_on_cpu) == ("cpu", None, True)
    assert on_cpu.env_defaults == {"ACCELERATE_USE_CPU": "true"}
    assert worker_plans(job(None, None))[0].env_defaults == {}
    managed = worker_plans(job(None, nccl_available=True, num_visible_devices=1), backend="nccl")[0]
    assert (managed.device, managed.bind_device) == ("cuda", False)


def test_when_a_start_falls_back():
    """After a refusal of NCCL; after any failure only where that was decided."""
    failures = [VerificationError("x"), OutOfMemoryError("x"), StartTimeoutError("x"), GroupFormationError("x")]
    for devices, facts, settings, after in [
        (_OWN, {}, {}, (True, False)),
        (_OWN, {}, {"on_shared_device": "error"}, (False, False)),
        (_SHARED, _NEW | _SWITCH, {}, (True, True)),
    ]:
        found = decide_start(job(*devices, **facts), Settings(**settings))
        assert found.falls_back_from(SharedDeviceError("x")) is after[0]
        assert {found.falls_back_from(error) for error in failures} == {after[1]}
        assert not found.falls_back_from(MissingDeviceError("x"))
        assert [each.is_trial for each in worker_plans(job(*devices, **facts), **settings)] == [after[1]] * 2


def test_the_fallback():
    """Gloo with a warning that contains the cause without its advice, and no further fallback."""
    found = decide_start(job(*_SHARED, **_NEW | _SWITCH), Settings())
    fallback = found.after_failure(VerificationError("wrong sum.", advice="Do not train with this group."))
    assert (fallback.backend, fallback.fallback, fallback.falls_back, fallback.env_defaults) == (
        "gloo",
        None,
        _NEVER,
        {},
    )
    assert fallback.reason.endswith("on node 10.0.0.1: using gloo (nccl failed its verification)")
    assert fallback.warnings[-1].endswith(
        "nccl failed its verification, fell back to gloo, so that gradients go through host memory and TCP: wrong sum"
    )
    with pytest.raises(ValueError, match="no fallback from gloo"):
        fallback.after_failure(VerificationError("x"))
