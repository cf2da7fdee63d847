"""The plan compared with an oracle for NCCL's own rule, over random jobs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.decide.worker_info import DeviceInfo, WorkerInfo
from ray_fracbackend.errors import FracBackendError, IncompatibleWorkersError
from tests.unit.builders import gpu, mig, num_calls, worker

_VERSIONS = [(2, minor, patch) for minor in range(18, 33) for patch in (0, 3, 7)]


@st.composite
def jobs(draw: st.DrawFn) -> list[WorkerInfo]:
    """Generate jobs with nodes, containers, shared fractions, MIG, AMD, missing or mixed NCCL, the user's switch, and Windows."""
    if draw(st.integers(0, 4)) == 0:
        return draw(one_pair())
    num_nodes = draw(st.integers(1, 3))
    one_version = draw(st.sampled_from(_VERSIONS))
    fraction = draw(st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0, 2.0]))
    windows = draw(st.booleans()) and draw(st.booleans())
    amd = not windows and draw(st.integers(0, 3)) == 0
    switch = draw(st.sampled_from(["none", "none", "some", "all", "all"]))
    workers: list[WorkerInfo] = []
    for node in range(num_nodes):
        devices = draw(_amd_devices(node) if amd else _node_devices(node))
        containers = draw(st.integers(1, 2))
        hostid = draw(st.sampled_from([None, None, None, "rank", "job"]))
        for _ in range(draw(st.integers(1, 4))):
            rank = len(workers)
            container = draw(st.integers(0, containers - 1))
            picked = draw(st.lists(st.sampled_from(devices), min_size=1, max_size=2, unique=True))
            mixed = draw(st.integers(0, 9)) == 0
            env = {} if hostid is None else {"NCCL_HOSTID": f"{rank}" if hostid == "rank" else "job"}
            if switch == "all" or (switch == "some" and draw(st.booleans())):
                env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
            has_nccl = not windows and draw(st.integers(0, 9)) > 0
            workers.append(
                worker(
                    rank,
                    picked[0],
                    node=f"{node}",
                    hostname=f"host{node}c{container}",
                    pid=1000 + rank,
                    devices=tuple(picked),
                    resources={"CPU": 1.0, "GPU": fraction},
                    platform="win32" if windows else "linux",
                    nccl_available=has_nccl,
                    nccl_version=(draw(st.sampled_from(_VERSIONS)) if mixed else one_version) if has_nccl else None,
                    env=env,
                )
            )
    return workers


@st.composite
def one_pair(draw: st.DrawFn) -> list[WorkerInfo]:
    """Return 64 workers with a GPU each on eight nodes, two of which on one node have the same GPU."""
    version = draw(st.sampled_from(_VERSIONS))
    fraction = draw(st.sampled_from([0.5, 1.0]))
    switch = draw(st.sampled_from(["none", "pair", "one", "all"]))
    first = draw(st.integers(0, 7)) * 8 + draw(st.integers(0, 6))
    pair = (first, draw(st.integers(first + 1, first // 8 * 8 + 7)))
    workers = []
    for rank in range(64):
        number = pair[0] if rank == pair[1] else rank
        has_switch = switch == "all" or (switch == "pair" and rank in pair) or (switch == "one" and rank == pair[0])
        workers.append(
            worker(
                rank,
                gpu(f"{number}", pci_bus_id=f"00000000:{number % 8}0:00.0"),
                node=f"{rank // 8}",
                pid=1000 + rank,
                resources={"CPU": 1.0, "GPU": fraction},
                nccl_version=version,
                env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if has_switch else {},
            )
        )
    return workers


@st.composite
def _node_devices(draw: st.DrawFn, node: int) -> list[DeviceInfo]:
    devices: list[DeviceInfo] = []
    for index in range(draw(st.integers(1, 4))):
        # The same bus ids on every node: NCCL distinguishes them only by host.
        bus = f"00000000:{index}0:00.0"
        if draw(st.integers(0, 3)) == 0:
            parent = f"n{node}g{index}"
            # NVML may not report the parent.
            named = {} if draw(st.integers(0, 3)) else {"parent_uuid": None}
            slices = range(draw(st.integers(1, 3)))
            devices += [mig(f"{parent}s{number}", parent, pci_bus_id=bus, **named) for number in slices]
        else:
            devices.append(gpu(f"n{node}g{index}", pci_bus_id=bus))
    return devices


@st.composite
def _amd_devices(draw: st.DrawFn, node: int) -> list[DeviceInfo]:
    """Return ROCm's devices: no NVML, so no compute mode and no parent; a bus id if torch has it."""
    with_bus = draw(st.booleans())
    return [
        DeviceInfo(
            uuid=f"GPU-n{node}a{index}",
            name="AMD Instinct MI300X",
            compute_mode="unknown",
            pci_bus_id=f"00000000:{index}0:00.0" if with_bus else None,
        )
        for index in range(draw(st.integers(1, 4)))
    ]


def oracle_nccl_refuses(workers: list[WorkerInfo]) -> set[int]:
    """NCCL's pairwise check: same host hash, and same bus id below 2.30.7 or same UUID from then on. Return the ranks of all pairs."""
    refused = set()
    for one, other in itertools.combinations(workers, 2):
        host = [w.env.get("NCCL_HOSTID", (w.hostname, w.boot_id)) for w in (one, other)]
        a, b = one.devices[0], other.devices[0]
        by_bus = one.nccl_version < (2, 30, 7) and (a.pci_bus_id or b.pci_bus_id)
        same = a.pci_bus_id == b.pci_bus_id if by_bus else a.uuid == b.uuid
        if host[0] == host[1] and same:
            refused |= {one.rank, other.rank}
    return refused


def oracle_uuid_shared(workers: list[WorkerInfo]) -> set[int]:
    """Return ranks that share a device, whether or not NCCL can detect it."""
    pairs = itertools.combinations(workers, 2)
    return {rank for a, b in pairs if a.devices[0].uuid == b.devices[0].uuid for rank in (a.rank, b.rank)}


def oracle_siblings(workers: list[WorkerInfo]) -> set[int]:
    """Return ranks on different MIG slices of one GPU: same parent, or same bus id on one host if the parent is unknown."""
    found = set()
    for one, other in itertools.combinations([w for w in workers if w.devices[0].is_mig], 2):
        a, b = one.devices[0], other.devices[0]
        hosts = [w.env.get("NCCL_HOSTID", (w.hostname, w.boot_id)) for w in (one, other)]
        unnamed = a.parent_uuid is None and b.parent_uuid is None
        one_gpu = hosts[0] == hosts[1] and a.pci_bus_id == b.pci_bus_id if unnamed else a.parent_uuid == b.parent_uuid
        if one_gpu and a.uuid != b.uuid:
            found |= {one.rank, other.rank}
    return found


def oracle_switch(workers: list[WorkerInfo], sharing: set[int]) -> bool:
    """Return whether the user enabled NCCL's multi-rank mode where needed, and the job's single NCCL version supports it."""
    versions = {w.nccl_version for w in workers}
    return (
        all(w.nccl_available for w in workers)
        and len(versions) == 1
        and min(versions) >= (2, 30)
        and all(workers[rank].env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" for rank in sharing)
    )


_BACKENDS = st.sampled_from(["auto", "nccl", "cpu:gloo,cuda:nccl"])
_POLICIES = st.sampled_from(["auto", "gloo", "nccl", "staged", "error"])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(jobs(), _BACKENDS, _POLICIES)
def test_nccl_exactly_where_it_works(workers, backend, policy):
    """Plain NCCL is used if and only if all ranks have it in one version, it would not refuse them, and nothing is shared.

    It has its multi-rank flags if and only if the policy or the user's own switch requests them. A fallback to Gloo has one warning.
    """
    everywhere = all(w.nccl_available for w in workers)
    one_version = everywhere and len({w.nccl_version for w in workers}) == 1
    shared = oracle_uuid_shared(workers)
    conflict = shared | (oracle_nccl_refuses(workers) if one_version else set())
    siblings = oracle_siblings(workers)
    has_flags = one_version and workers[0].nccl_version >= (2, 30)
    # NCCL's flags also apply to slices of one GPU, if they were requested.
    if not conflict and has_flags and (policy == "nccl" or (policy == "auto" and oracle_switch(workers, siblings))):
        conflict = siblings
    try:
        plan = decide_start(workers, Settings(backend=backend, on_shared_device=policy))
    except IncompatibleWorkersError:
        assert everywhere
        assert not one_version
        return
    except FracBackendError:
        assert shared or (everywhere and oracle_refuses_any_version(workers))
        assert policy in ("error", "nccl")
        return
    uses_nccl = "nccl" in plan.backend
    if one_version:
        assert uses_nccl == (
            not conflict or policy == "nccl" or (policy == "auto" and oracle_switch(workers, conflict))
        )
        assert bool(plan.env_defaults) == (uses_nccl and bool(conflict))
        assert not (conflict and policy == "error")
    else:
        assert not uses_nccl
    if plan.env_defaults:
        assert plan.fallback == (None if policy == "nccl" else "gloo")
        assert plan.is_trial == (plan.fallback is not None)
    # Never plain Gloo for CUDA tensors on Windows (pytorch#186535); on other systems staged only by its policy.
    if not uses_nccl:
        assert plan.share_groups or not conflict
        staged = workers[0].platform == "win32" or (policy == "staged" and bool(plan.share_groups))
        assert plan.backend == ("cpu:gloo,cuda:staged" if staged else "gloo")
    if not uses_nccl and plan.share_groups and policy == "auto" and any(w.nccl_available for w in workers):
        ranks = {rank for group in plan.share_groups for rank in group.ranks}
        assert len([w for w in plan.warnings if f"{len(ranks)} of {len(workers)} ranks share a GPU" in w]) == 1


def oracle_refuses_any_version(workers: list[WorkerInfo]) -> bool:
    """As oracle_nccl_refuses, for ranks of different versions: each pair by the rule of either version."""
    pairs = itertools.combinations(workers, 2)
    return any(one.devices[0].pci_bus_id == other.devices[0].pci_bus_id for one, other in pairs)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), jobs(), _BACKENDS, st.sampled_from(["auto", "gloo", "nccl", "error", "ipc", "staged"]))
def test_the_order_of_ranks_decides_nothing(data, workers, backend, policy):
    """With other rank numbers the same workers get the same backend, flags, fallback and groups, or the same error class."""
    if data.draw(st.integers(0, 3)) == 0:  # a worker that does not know its device's compute mode, and one that does
        odd = data.draw(st.integers(0, len(workers) - 1))
        mode = data.draw(st.sampled_from(["exclusive_process", "prohibited", "unknown"]))
        devices = tuple(replace(device, compute_mode=mode) for device in workers[odd].devices)
        workers = [replace(w, devices=devices) if w.rank == odd else w for w in workers]
    if data.draw(st.integers(0, 9)) == 0:
        workers[0] = replace(workers[0], devices=(), cuda_missing="the driver is too old")
    options = Settings(
        backend=backend, on_shared_device=policy, on_missing_cuda=data.draw(st.sampled_from(["error", "cpu"]))
    )
    order = data.draw(st.permutations(range(len(workers))))
    other = [replace(workers[old], rank=rank) for rank, old in enumerate(order)]
    assert decided(workers, options) == decided(other, options)


def decided(workers: list[WorkerInfo], options: Settings) -> object:
    """Return the decision of a plan, with processes instead of ranks, or the class of the error."""
    try:
        plan = decide_start(workers, options)
    except FracBackendError as error:
        return type(error)
    groups = {frozenset(workers[rank].pid for rank in group.ranks) for group in plan.share_groups}
    return plan.backend, plan.device_type, plan.fallback, dict(plan.env_defaults), plan.train_on_cpu, groups


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    jobs(),
    st.sampled_from(["auto", "nccl", "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", "staged"]),
    st.sampled_from(["auto", "gloo", "nccl", "staged", "ipc", "error"]),
    st.sampled_from(["error", "cpu"]),
    st.booleans(),
)
def test_gloo_gets_cuda_tensors_on_windows_only_by_name(workers, backend, policy, on_missing_cuda, can_stage):
    """Whatever else was requested, even if staged cannot be used; an explicit Gloo has a warning with the issue number."""
    none = {"nccl_available": False, "nccl_version": None}  # torch for Windows has no NCCL
    workers = [replace(w, platform="win32", staged_missing=None if can_stage else "no", **none) for w in workers]
    try:
        plan = decide_start(
            workers, Settings(backend=backend, on_shared_device=policy, on_missing_cuda=on_missing_cuda)
        )
    except FracBackendError:
        return
    named = backend in ("gloo", "cpu:gloo,cuda:gloo")
    if plan.backends.by_device.get("cuda") == "gloo" and plan.device_type == "cuda":
        assert named
        assert any("pytorch#186535" in warning for warning in plan.warnings)
    assert not named or plan.backend == backend
    assert plan.fallback != "gloo"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_every_shared_rank_is_named(workers):
    plan = decide_start(workers, Settings(backend="gloo"))
    expected = {}
    for facts in workers:
        expected.setdefault(facts.devices[0].uuid, []).append(facts.rank)
    named = {group.device.uuid: list(group.ranks) for group in plan.share_groups if group.same_device}
    assert named == {uuid: ranks for uuid, ranks in expected.items() if len(ranks) > 1}


@given(st.floats(0.05, 0.95), st.integers(1, 4), st.data())
def test_a_device_is_never_counted_from_the_local_rank(fraction, num_gpus, data):
    """Each worker trains on its own device; if LOCAL_RANK is another rank's device, there is a hint (ray_lightning#124)."""
    num_fit = num_gpus * int(1 / fraction + 1e-9)
    num_workers = data.draw(st.integers(1, min(num_fit, 16)))
    of_gpu = sorted(data.draw(st.lists(st.integers(0, num_gpus - 1), min_size=num_workers, max_size=num_workers)))
    workers = [
        worker(rank, gpu(f"g{index}", index=index), resources={"GPU": fraction}, num_visible_devices=num_gpus)
        for rank, index in enumerate(of_gpu)
    ]
    plan = decide_start(workers, Settings())
    assert [plan.device_of(each) for each in workers] == [f"cuda:{index}" for index in of_gpu]
    others = [rank for rank, index in enumerate(of_gpu) if rank < num_gpus and rank != index]
    told = [hint for hint in plan.hints if "is not the device of rank" in hint]
    assert len(told) == bool(others)
    assert not others or f"LOCAL_RANK {others[0]} is not the device of rank {others[0]} " in told[0]


@pytest.mark.parametrize("shared", [False, True])
def test_planning_is_linear(shared):
    def calls(count):
        workers = [worker(rank, gpu(f"{rank // 2 if shared else rank}"), node=f"{rank // 8}") for rank in range(count)]
        return num_calls(decide_start, workers, Settings())

    assert calls(5_000) < 12 * calls(500)
