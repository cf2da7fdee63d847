"""The plan against an oracle written from NCCL's own rule, over random jobs."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_fracbackend.errors import FracBackendError, IncompatibleWorkersError
from ray_fracbackend.facts import DeviceFacts, WorkerFacts
from ray_fracbackend.options import StartOptions
from ray_fracbackend.plan import plan_start
from tests.unit.builders import gpu, mig, worker

_VERSIONS = [(2, minor, patch) for minor in range(18, 33) for patch in (0, 3, 7)]


@st.composite
def jobs(draw: st.DrawFn) -> list[WorkerFacts]:
    """Random jobs: nodes, containers on one host, whole GPUs, fractions, several GPUs a worker, MIG, UUID or index names,
    missing NCCL, mixed versions, Windows."""
    num_nodes = draw(st.integers(1, 3))
    one_version = draw(st.sampled_from(_VERSIONS))
    fraction = draw(st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0, 2.0]))
    windows = draw(st.booleans()) and draw(st.booleans())
    workers: list[WorkerFacts] = []
    for node in range(num_nodes):
        devices = draw(_node_devices(node))
        containers = draw(st.integers(1, 2))
        hostid = draw(st.sampled_from([None, None, None, "rank", "job"]))
        for index in range(draw(st.integers(1, 4))):
            rank = len(workers)
            container = draw(st.integers(0, containers - 1))
            picked = draw(st.lists(st.sampled_from(devices), min_size=1, max_size=2, unique=True))
            mixed = draw(st.integers(0, 9)) == 0
            env = {} if hostid is None else {"NCCL_HOSTID": f"{rank}" if hostid == "rank" else "job"}
            has_nccl = not windows and draw(st.integers(0, 9)) > 0
            workers.append(
                worker(
                    rank,
                    picked[0],
                    node=f"{node}",
                    hostname=f"host{node}c{container}",
                    devices=tuple(picked),
                    resources={"CPU": 1.0, "GPU": fraction},
                    cuda_visible_devices=draw(st.sampled_from([picked[0].uuid, str(index), None])),
                    platform="win32" if windows else "linux",
                    nccl_available=has_nccl,
                    nccl_version=(draw(st.sampled_from(_VERSIONS)) if mixed else one_version) if has_nccl else None,
                    env=env,
                )
            )
    return workers


@st.composite
def _node_devices(draw: st.DrawFn, node: int) -> list[DeviceFacts]:
    devices: list[DeviceFacts] = []
    for index in range(draw(st.integers(1, 4))):
        # The same bus ids on every node: NCCL tells them apart by host only.
        bus = f"00000000:{index}0:00.0"
        if draw(st.integers(0, 3)) == 0:
            parent = f"n{node}g{index}"
            devices += [mig(f"{parent}s{number}", parent, pci_bus_id=bus) for number in range(draw(st.integers(1, 3)))]
        else:
            devices.append(gpu(f"n{node}g{index}", pci_bus_id=bus))
    return devices


def oracle_nccl_refuses(workers: list[WorkerFacts]) -> bool:
    """NCCL's own pairwise check: equal host hash, and equal bus id below 2.30.7 or equal UUID from then on."""
    for one, other in itertools.combinations(workers, 2):
        host = [w.env.get("NCCL_HOSTID", (w.hostname, w.boot_id)) for w in (one, other)]
        if host[0] != host[1]:
            continue
        a, b = one.devices[0], other.devices[0]
        if a.uuid == b.uuid if one.nccl_version >= (2, 30, 7) else a.pci_bus_id == b.pci_bus_id:
            return True
    return False


def oracle_uuid_shared(workers: list[WorkerFacts]) -> bool:
    """Two ranks on one device, whatever NCCL can see of it."""
    return any(a.devices[0].uuid == b.devices[0].uuid for a, b in itertools.combinations(workers, 2))


def oracle_siblings(workers: list[WorkerFacts]) -> bool:
    """Two ranks on different MIG slices of one GPU."""
    parents = [(w.devices[0].parent_uuid, w.devices[0].uuid) for w in workers if w.devices[0].parent_uuid]
    return any(a[0] == b[0] and a[1] != b[1] for a, b in itertools.combinations(parents, 2))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    jobs(), st.sampled_from(["auto", "nccl", "cpu:gloo,cuda:nccl"]), st.sampled_from(["auto", "gloo", "nccl", "error"])
)
def test_plain_nccl_exactly_where_it_works(workers, backend, policy):
    """Plain NCCL is picked if and only if NCCL is on all ranks in one version, would not refuse, and nothing is shared."""
    everywhere = all(w.nccl_available for w in workers)
    same_version = len({w.nccl_version for w in workers}) == 1
    shared = oracle_uuid_shared(workers)
    conflict = shared or (everywhere and same_version and oracle_nccl_refuses(workers))
    # NCCL's flags were asked for, and this NCCL has them: they are for slices of one GPU too.
    if policy == "nccl" and everywhere and same_version and workers[0].nccl_version >= (2, 30):
        conflict = conflict or oracle_siblings(workers)
    try:
        plan = plan_start(workers, StartOptions(backend=backend, on_shared_device=policy))
    except IncompatibleWorkersError:
        assert everywhere
        assert not same_version
        return
    except FracBackendError:
        assert shared or (everywhere and oracle_refuses_any_version(workers))
        return
    plain_nccl = "nccl" in plan.backend and not plan.env_defaults
    if everywhere and same_version:
        assert plain_nccl == (not conflict)
    else:
        assert not plain_nccl


def oracle_refuses_any_version(workers: list[WorkerFacts]) -> bool:
    """As oracle_nccl_refuses, for ranks of different versions: each pair by either one's rule."""
    pairs = itertools.combinations(workers, 2)
    return any(one.devices[0].pci_bus_id == other.devices[0].pci_bus_id for one, other in pairs)


def outcome(workers: list[WorkerFacts], options: StartOptions) -> str:
    """The backend, or the class of the error."""
    try:
        return plan_start(workers, options).backend
    except FracBackendError as error:
        return type(error).__name__


@pytest.mark.parametrize("without", [0, 1])
@pytest.mark.parametrize("policy", ["auto", "gloo", "nccl"])
def test_one_rank_without_nccl_decides_whichever_it_is(without, policy):
    """Two MIG slices of one GPU, NCCL 2.30.7 on one rank alone: gloo, whether it is rank 0 or rank 1 that has it."""
    workers = [worker(rank, mig(f"s{rank}"), nccl_version=(2, 30, 7)) for rank in range(2)]
    workers[without] = replace(workers[without], nccl_available=False, nccl_version=None)
    assert outcome(workers, StartOptions(on_shared_device=policy)) == "gloo"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_every_shared_rank_is_named(workers):
    """The share map holds exactly the ranks that sit on one device with another, by device."""
    plan = plan_start(workers, StartOptions(backend="gloo"))
    expected = {}
    for facts in workers:
        expected.setdefault(facts.devices[0].uuid, []).append(facts.rank)
    named = {group.device.uuid: list(group.ranks) for group in plan.share_groups if group.same_device}
    assert named == {uuid: ranks for uuid, ranks in expected.items() if len(ranks) > 1}


@pytest.mark.parametrize("shared", [False, True])
def test_planning_is_linear(shared):
    """Ten times the workers make at most twelve times the calls: counted, not timed."""

    def num_calls(count):
        workers = [worker(rank, gpu(f"{rank // 2 if shared else rank}"), node=f"{rank // 8}") for rank in range(count)]
        calls = 0

        def profile(frame, event, arg):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            plan_start(workers, StartOptions())
        finally:
            sys.setprofile(None)
        return calls

    assert num_calls(5_000) < 12 * num_calls(500)
