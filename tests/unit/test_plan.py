"""Every row of the decision: workers and settings, and the backend, device, fallback and warnings that they get."""

from dataclasses import fields

import pytest

from ray_fracbackend.decide.job import Job
from ray_fracbackend.decide.left_to_ray import left_to_ray
from ray_fracbackend.decide.nccl import interface_doubts, matching
from ray_fracbackend.decide.plan import FallBack, StartPlan, WorkerPlan
from ray_fracbackend.decide.rendezvous import plan_rendezvous
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import ROWS, decide_start
from ray_fracbackend.decide.worker_info import NetworkInfo
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
from tests.unit.builders import gpu, job, mig, worker, worker_plan

_NEVER, _REFUSAL, _FAILURE = FallBack
_CPU, _OWN, _SHARED, _SLICES = (None, None), (gpu("a"), gpu("b", index=1)), (gpu(), gpu()), (mig("1"), mig("2"))
_STAGED, _PAIR, _GLOO_PAIR = "cpu:gloo,cuda:staged", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"
_NEW, _OLD, _NO_NCCL = {"nccl_version": (2, 30, 7)}, {"nccl_version": (2, 30, 6)}, {"nccl_available": False}
_SWITCH = {"env": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}
_DETAIL = {"env": {"TORCH_DISTRIBUTED_DEBUG": "detail"}}
_WINDOWS = {"platform": "win32", "resources": {"GPU": 0.4}, **_NO_NCCL}
_MISSING = {"resources": {"GPU": 1.0}, "cuda_missing": "no driver"}
_NO_STAGED, _IPC, _SEEN = {"staged_missing": "no"}, {"ipc_host_memory_missing": None}, {"num_visible_devices": 1}
_TWO_VERSIONS = [worker(0, gpu(), **_NEW), worker(1, gpu(), nccl_version=(2, 30, 6))]
_ONE_HOST = NetworkInfo(network_id="of both Ray nodes")
_EXCLUSIVE, _UNKNOWN = (gpu(compute_mode=mode) for mode in ("exclusive_process", "unknown"))
_HALF_KNOWN = [worker(0, _UNKNOWN, mps_reachable=True), worker(1, _EXCLUSIVE), worker(2, _UNKNOWN)]
_UNNAMED = (mig("1", parent_uuid=None), mig("2", parent_uuid=None))  # NVML does not name the parent
_ON_CPU = {"device": "cpu", "on_missing_cuda": "cpu"}
_COST, _OVERRIDE, _WINDOWS_GLOO = "ranks share a GPU", "cannot be used here", "pytorch#186535"


def case(devices, facts, expected, device="cuda", falls_back=_NEVER, warns=(), **settings):
    """Return workers, settings and what they get: a backend or the class of an error, and a part of each warning."""
    workers = devices if isinstance(devices, list) else job(*devices, **facts)
    return workers, settings, expected, device, falls_back, warns


# By the name of the row that decides.
_CASES = {
    "mixed systems": [case([worker(0, platform="win32"), worker(1)], {}, IncompatibleWorkersError)],
    "NCCL without GPUs": [
        case(_CPU, {}, MissingDeviceError, backend="nccl"),
        case(_CPU, _SEEN, MissingDeviceError, backend=_PAIR),
        case(_CPU, {"nccl_available": True}, MissingDeviceError, backend="nccl"),
    ],
    "missing CUDA": [
        case(_CPU, _MISSING, MissingDeviceError),
        case(_CPU, _MISSING, MissingDeviceError, backend="ipc"),
        case(_CPU, _MISSING, MissingDeviceError, backend="staged"),
        case(_CPU, {"resources": {"GPU": 1.0}}, MissingDeviceError, backend=_PAIR),
        case([worker(0, gpu()), worker(1, **_MISSING)], {}, MissingDeviceError),
    ],
    "compute mode": [case(_HALF_KNOWN, {}, SharedDeviceError, backend="gloo")],
    "sharing forbidden": [
        case(_SHARED, {}, SharedDeviceError, on_shared_device="error"),
        case(_SHARED, {}, SharedDeviceError, on_shared_device="error", backend="gloo"),
        case(_SLICES, _OLD, SharedDeviceError, on_shared_device="error"),
        case(_SHARED, _NEW | _SWITCH, SharedDeviceError, on_shared_device="error"),
    ],
    "mixed NCCL versions": [
        case([worker(0, gpu("a")), worker(1, gpu("b"), **_NEW)], {}, IncompatibleWorkersError),
        case([worker(0, mig("1"), **_NEW), worker(1, mig("2"))], {}, IncompatibleWorkersError, on_shared_device="nccl"),
    ],
    "no GPUs": [
        case(_CPU, {}, "gloo", "cpu"),
        case(_CPU, {"cuda_missing": "no driver"}, "gloo", "cpu"),
        case(_CPU, _DETAIL, "gloo", "cpu", warns=["DETAIL on ranks 0,1"]),
        case(_CPU, _DETAIL | _IPC, "ipc", "cpu", backend="ipc"),
        case(_CPU, {}, _GLOO_PAIR, "cpu", backend=_GLOO_PAIR),
        case(_CPU, {}, "staged", "cpu", backend="staged"),
        case(_CPU, _NO_STAGED, BackendUnavailableError, backend="staged"),
        case(_CPU, _IPC, "ipc", "cpu", backend="ipc"),
        case(_CPU, {}, BackendUnavailableError, backend="ipc"),
        case(_CPU, {"network": NetworkInfo(gloo_missing="built without Gloo")}, BackendUnavailableError),
        case(_CPU, {"network": NetworkInfo(gloo_missing="no transport")}, BackendUnavailableError),
        case(_CPU, {"nccl_available": True, **_SEEN}, "nccl", backend="nccl"),
    ],
    "gloo without CUDA": [case(_CPU, _MISSING, "gloo", "cpu", warns=["torch cannot use"], backend="gloo")],
    "training on the CPU": [
        case(_CPU, _MISSING, "gloo", **_ON_CPU),
        case([worker(0, gpu()), worker(1, **_MISSING)], {}, "gloo", **_ON_CPU),
        case(_CPU, _MISSING, "gloo", warns=[_OVERRIDE], backend="nccl", **_ON_CPU),
        case(_CPU, _MISSING, "gloo", warns=[_OVERRIDE], backend="staged", **_ON_CPU),
        case(_CPU, _MISSING, "gloo", backend=_GLOO_PAIR, **_ON_CPU),
        case(_CPU, _MISSING | _IPC, "ipc", backend="ipc", **_ON_CPU),
        case(_CPU, _MISSING | _IPC, "ipc", on_shared_device="ipc", **_ON_CPU),
        case(_CPU, _MISSING | _IPC, "gloo", on_shared_device="gloo", **_ON_CPU),
        case(_CPU, _MISSING | _IPC, "gloo", on_shared_device="ipc", backend="gloo", **_ON_CPU),
    ],
    "several ranks per GPU": [
        case(_SHARED, _NEW, "nccl", on_shared_device="nccl"),
        case(_SHARED, {"nccl_version": (2, 30, 0)}, "nccl", on_shared_device="nccl"),
        case(_SHARED, _NEW, _PAIR, on_shared_device="nccl", backend=_PAIR),
        case(_SHARED, {}, BackendUnavailableError, on_shared_device="nccl"),
        case(_SHARED, {"nccl_version": None}, BackendUnavailableError, on_shared_device="nccl"),
        case(_SHARED, _NEW | _NO_NCCL, BackendUnavailableError, on_shared_device="nccl"),
        case(_TWO_VERSIONS, {}, IncompatibleWorkersError, on_shared_device="nccl"),
        case(_SHARED, _NEW | _SWITCH, "nccl", falls_back=_FAILURE),
        case(_SHARED, {"nccl_version": (2, 30, 0), **_SWITCH}, "nccl", falls_back=_FAILURE),
        case(_SLICES, _NEW, "nccl", on_shared_device="nccl"),
        case(_SLICES, _NEW | _SWITCH, "nccl", falls_back=_FAILURE),
    ],
    "ipc": [
        case(_SHARED, _IPC, "ipc", backend="ipc"),
        case(_SHARED, _IPC, "ipc", on_shared_device="ipc"),
        case([worker(n, gpu(), node_id=f"{n}", network=_ONE_HOST, **_IPC) for n in (0, 1)], {}, "ipc", backend="ipc"),
        case(_SHARED, _IPC | _NEW | _SWITCH, "ipc", on_shared_device="ipc"),
        case(_SHARED, _IPC, "ipc", warns=[_OVERRIDE], on_shared_device="ipc", backend="nccl"),
        case(_SHARED, {}, BackendUnavailableError, on_shared_device="ipc"),
    ],
    "staged": [
        case(_SHARED, {}, _STAGED, on_shared_device="staged"),
        case(_SHARED, {}, _STAGED, warns=[_OVERRIDE], on_shared_device="staged", backend="nccl"),
        case(_SHARED, _NO_STAGED, BackendUnavailableError, on_shared_device="staged"),
        case(_OWN, {}, "staged", backend="staged"),
        case(_OWN, {}, _STAGED, backend=_STAGED),
    ],
    "gloo": [
        case(_OWN, {}, "gloo", backend="gloo"),
        case((_EXCLUSIVE, _EXCLUSIVE), {"mps_reachable": True}, "gloo", backend="gloo"),
        case(_SHARED, {}, "gloo", on_shared_device="gloo"),
        case(_SLICES, _OLD, "gloo", on_shared_device="error", backend="gloo"),
        case(_SHARED, {}, "gloo", warns=[_OVERRIDE], on_shared_device="gloo", backend="nccl"),
        case(_SHARED, _NEW | _SWITCH, "gloo", on_shared_device="gloo"),
        case(_SHARED, _WINDOWS, _STAGED, on_shared_device="gloo"),
        case(_SHARED, _WINDOWS, "gloo", warns=[_WINDOWS_GLOO], backend="gloo"),
        case(_OWN, _WINDOWS, _GLOO_PAIR, warns=[_WINDOWS_GLOO], backend=_GLOO_PAIR),
        case(_OWN, _WINDOWS, "cpu:gloo", backend="cpu:gloo"),
    ],
    "shared": [
        case(_SHARED, {}, "gloo", warns=[f"2 of 2 {_COST}"]),
        case((*_SHARED, gpu("b")), {}, "gloo", warns=[f"2 of 3 {_COST}"]),
        case(_SHARED, _NEW, "gloo", warns=[_COST]),
        case(_SHARED, _SWITCH, "gloo", warns=[_COST]),
        case([worker(0, gpu(), **_NEW | _SWITCH), worker(1, gpu(), **_NEW)], {}, "gloo", warns=[_COST]),
        case(_SHARED, {}, "gloo", warns=[_OVERRIDE, _COST], backend=_PAIR),
        case(_SLICES, _OLD, "gloo", warns=[_COST]),
        case((mig("1", pci_bus_id=None), mig("2", pci_bus_id=None)), _OLD, "gloo", warns=[_COST]),
        case(_SHARED, _NO_NCCL, "gloo"),
        case(_SHARED, _WINDOWS, _STAGED),
        case(_SHARED, _WINDOWS | _NO_STAGED, BackendUnavailableError),
    ],
    "no NCCL": [
        case([worker(0, gpu("a")), worker(1, gpu("b"), **_NO_NCCL)], {}, "gloo", warns=["rank 1 lacks"]),
        case([worker(0, mig("1"), **_NEW), worker(1, mig("2"), **_NO_NCCL)], {}, "gloo", warns=["rank 1 lacks"]),
        case(_OWN, _NO_NCCL, "gloo", warns=[_OVERRIDE], backend="nccl"),
        case(_OWN, _WINDOWS, _STAGED),
    ],
    "own devices": [
        case(_OWN, {}, "nccl", falls_back=_REFUSAL),
        case(_OWN, {}, "nccl", falls_back=_REFUSAL, on_shared_device="gloo"),
        case(_OWN, {}, "nccl", on_shared_device="error"),
        case([worker(0, gpu()), worker(1, gpu(uuid="GPU-b"), "2", hostname="host1")], {}, "nccl", falls_back=_REFUSAL),
        case(_OWN, {}, _PAIR, on_shared_device="nccl", backend=_PAIR),
        case((_EXCLUSIVE, gpu("b")), {}, "nccl", falls_back=_REFUSAL),
        case([worker(0, gpu("a")), worker(1, gpu("b"), nccl_version=None)], {}, "nccl", falls_back=_REFUSAL),
        case((mig("1", "a"), mig("2", "b")), {}, "nccl", falls_back=_REFUSAL),
        case((gpu("b"), *_SLICES), _NEW, "nccl", falls_back=_FAILURE, warns=["may refuse them"]),
        case(_UNNAMED, _NEW, "nccl", falls_back=_FAILURE, warns=["may refuse them"]),
    ],
}


@pytest.mark.parametrize(
    ("name", "workers", "settings", "expected", "device", "falls_back", "warns"),
    [(name, *each) for name, cases in _CASES.items() for each in cases],
)
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
    assert list(_CASES) == [each.name for each in ROWS]


def test_reason_and_share_groups():
    """The log line of the README: who shares what, where, and why Gloo."""
    found = decide_start([*job(gpu("ab12cd34-56"), gpu("ab12cd34-56")), worker(2, gpu("b"))], Settings())
    assert found.reason == (
        "ranks 0,1 share GPU-ab12cd34 (NVIDIA H200) on node 10.0.0.1: using gloo (NCCL 2.28.9 refuses shared devices)"
    )
    assert [group.ranks for group in found.share_groups] == [(0, 1)]
    eight, nine = (decide_start(job(*[gpu()] * number), Settings()).reason for number in (8, 9))
    assert eight.startswith("ranks 0,1,2,3,4,5,6,7 share")
    assert nine.startswith("ranks 0,1,2,3,4,5,6,7,... (9 in all) share")
    many = decide_start(job(*[gpu(f"{rank // 2}") for rank in range(20)]), Settings())
    assert "and 7 more such groups: using gloo" in many.reason
    assert many.reason.count(" share ") == 3
    flags = decide_start(job(*_SHARED, **_NEW), Settings(on_shared_device="nccl"))
    assert flags.reason.endswith("using nccl with several ranks per GPU (on_shared_device='nccl', NCCL 2.30.7)")
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
        (
            [worker(0, **_IPC), worker(1, node="2", **_IPC)],
            {"backend": "ipc"},
            (1,),
            "10.0.0.2, pid 0): it is for workers on one",
        ),
        ([worker(0), worker(1, platform="win32")], {}, (1,), "Windows on rank 1"),
        (
            [worker(0), worker(1, network=NetworkInfo(gloo_missing="built without Gloo"))],
            {},
            (1,),
            "built without Gloo",
        ),
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
        apart = [*job(*[gpu()] * ranks, **_NEW), *(worker(ranks + each, gpu("b"), node="2", **_NEW) for each in (0, 1))]
        assert decide_start(apart, settings).env_defaults == flags | {"NCCL_NET_GDR_LEVEL": "LOC"}
        found = decide_start(job(*[gpu()] * ranks, **_NEW, env={"NCCL_MAX_CTAS": "16"}), settings)
        assert found.warnings == ("NCCL_MAX_CTAS=16 was set by the user and is kept",)


def test_hints_about_fractions():
    """An unused part of a GPU."""
    accepted = Settings(on_shared_device="gloo")
    for fraction, said in [
        (0.4, "2 on a GPU and 0.2 of it stays unused"),
        (0.6, "and 0.4"),
        (0.22, None),
        (1 / 3, None),
        (1.0, None),
    ]:
        (hint,) = decide_start(job(gpu(), resources={"GPU": fraction}), accepted).hints or [None]
        assert (hint is None) if said is None else (said in hint)


def test_a_fraction_of_a_gpu_that_has_a_display_driver():
    """On Windows more memory than the driver leaves is taken from the system without an error, so a part stays unused there."""
    for fraction, hint in ((0.5, "ask for 0.45 GPU,"), (0.25, "ask for 0.22"), (0.45, None), (0.4, None), (1.0, None)):
        on_windows = job(gpu(), platform="win32", resources={"GPU": fraction})
        hints = decide_start(on_windows, Settings()).hints
        assert len(hints) == (hint is not None)
        assert all(hint in each for each in hints)


@pytest.mark.parametrize("backend", ["tpu_dist", "hccl", "mine", "cpu:gloo,xpu:ccl", "npu:gloo", "gpu:nccl"])
def test_other_backends_are_left_to_ray(backend):
    """Names that are not ours; those of the table are."""
    assert left_to_ray(backend, {})
    for ours in ("auto", "nccl", "gloo", "ipc", "staged", _PAIR, "cuda:nccl,cpu:gloo"):
        assert left_to_ray(ours, {"CPU": 1, "GPU": 0.5}) is None


def test_other_accelerators_are_left_to_ray():
    for resource in ("TPU", "HPU", "NPU", "RBLN", "FURIOSA", "TTNPU", "MBLT", "neuron_cores"):
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
    assert worker_plan(backend=backend, device=device).verify_on == expected
    assert worker_plan(backend=backend, device=device, verify=False).verify_on == ()


def worker_plans(workers, **options):
    settings = Settings(**options)
    decision = decide_start(workers, settings)
    plan = StartPlan(decision, plan_rendezvous(workers, settings, decision.backend, 29500))
    return plan.worker_plans(workers, settings, budget_s=1.0, attempt="a")


def test_the_plan_has_the_settings_of_the_same_name():
    """One of a new setting too: a field of `WorkerPlan` with a default could hide that the setting never arrives."""
    settings, names = Settings(), {each.name for each in fields(Settings)} & {each.name for each in fields(WorkerPlan)}
    plan = StartPlan(decide_start(job(*_OWN), settings), plan_rendezvous(job(*_OWN), settings, "nccl", 29500))
    for name in names - {"backend", "master_addr", "master_port"}:  # of decision and rendezvous
        setattr(settings, name, value := object())
        (made, _) = plan.worker_plans(job(*_OWN), settings, budget_s=1.0, attempt="a")
        assert getattr(made, name) is value


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
    two = worker_plans(job(*_OWN, resources={"GPU": 2.0}), limit_gpu_memory=True)[1]
    assert two.memory_fraction is worker_plans(job(*_SHARED))[0].memory_fraction is None
    lost = job(None, None, **_MISSING | {"resources": {"GPU": 0.5}})
    on_cpu = worker_plans(lost, limit_gpu_memory=True, on_missing_cuda="cpu")[1]
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
    assert (fallback.backend, fallback.fallback, fallback.falls_back) == ("gloo", None, _NEVER)
    assert fallback.env_defaults == {}
    assert fallback.reason.endswith("on node 10.0.0.1: using gloo (nccl failed its verification)")
    assert fallback.warnings[-1].endswith(
        "nccl failed its verification, fell back to gloo, so that gradients go through host memory and TCP: wrong sum"
    )
    with pytest.raises(ValueError, match="no fallback from gloo"):
        fallback.after_failure(VerificationError("x"))


_INTERFACES = ["lo", "eth0", "eth1", "docker0", "ib0"]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth0,ib", ["eth0", "ib0"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^docker", ["eth0", "eth1", "ib0"]),
        ("^docker,eth,ib", []),
        ("^=eth0,docker0", ["eth1", "ib0"]),
        ("lo", ["lo"]),
        ("nosuch0", []),
    ],
)
def test_nccls_syntax_of_interfaces(value, names):
    """Prefixes, exact names and exclusions, as in NCCL's documentation; a doubt if nothing matches, with the ranks."""
    assert matching(value, _INTERFACES) == names
    network = NetworkInfo(interfaces=dict.fromkeys(_INTERFACES, ()))
    own, unknown, none = {"NCCL_SOCKET_IFNAME": value}, worker(1), worker(2, network=network)
    doubts = interface_doubts([worker(0, network=network, env=own), unknown, none])
    assert [doubt.partition(":")[0] for doubt in doubts] == ([] if names else ["rank 0"])
