"""Uses of Ray Train with CUDA tensors on shared devices and every backend: restarts, checkpoints, FSDP2, elastic groups, libraries.

tests/gpu/test_gpu_training.py contains the rest: the losses of each backend, libraries and Tune with Gloo.
"""

from __future__ import annotations

import uuid
from importlib.util import find_spec

import pytest
import ray
import torch
from ray.train import ScalingConfig

from tests.cuda import cuda_jobs
from tests.cuda.emulated import MAKES_NCCL, needs_rig
from tests.gpu.gpu_engine import Engine
from tests.gpu.gpu_training import losses_of_one_process

pytestmark = [needs_rig, pytest.mark.timeout(400)]

full = pytest.mark.full()
IS_ELASTIC = "tuple" in str(ScalingConfig.__dataclass_fields__["num_workers"].type).lower()


def cases(*default, others=()):
    """Return parameters, some of which run by default and the others with --full."""
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in default else full)
        for case in dict.fromkeys([*default, *others])
    ]


EVERY_BACKEND = [(version, backend) for version in ("v1", "v2") for backend in ("gloo", "staged", "ipc")]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Return engines by version, each with a Ray on a machine with one device; started on first use."""
    engines = {}

    def engine(version):
        if version not in engines:
            state = tmp_path_factory.mktemp("machine")
            run = {"RAY_FRACBACKEND_TEST_RUN": uuid.uuid4().hex}
            engines[version] = Engine(version, CUDA_RIG_DEVICES="1", CUDA_RIG_STATE=str(state), **run)
        return engines[version]

    yield engine
    for one in engines.values():
        one.close()


@pytest.fixture(scope="module")
def alone():
    """Return losses and weights of one process with the whole batches."""
    return cuda_jobs.train_alone("cuda")


def run(engine, name, backend, timeout_s=200, **job):
    """Return the ranks' results of a job that succeeded with the backend on shared devices."""
    settings = {"on_shared_device": backend, **job.pop("settings", {})}
    answer = engine.run(name, settings=settings, timeout_s=timeout_s, **job)
    assert answer["errors"] == []
    assert {rank["backend"].removeprefix("cpu:gloo,cuda:") for rank in answer["ranks"]} == {backend}
    return answer["ranks"]


def check_resumed(rank, alone, first):
    """Check that a rank continued from that step as one process does."""
    losses, weights = alone
    assert rank["first"] == first
    assert rank["losses"] == pytest.approx(losses[first : first + len(rank["losses"])], rel=1e-4)
    if first + len(rank["losses"]) == len(losses):
        torch.testing.assert_close(torch.tensor(rank["weights"]), torch.tensor(weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("version", "backend", "fault"),
    cases(
        ("v2", "ipc", "kill"),
        ("v1", "staged", "raise"),
        others=[(*each, fault) for each in EVERY_BACKEND for fault in ("kill", "raise", "kill late", "raise late")],
    ),
)
def test_a_second_attempt_resumes(engine_of, alone, version, backend, fault):
    """After a rank failed, a new group resumes from the checkpoint, each rank from its own file, with the result of one process."""
    ranks = run(engine_of(version), "resume", backend, fault=fault)
    assert len(ranks) == 2
    for rank in ranks:
        check_resumed(rank, alone, first=2)
        assert rank["device"] == "cuda:0"
    assert [worker["pid"] for worker in ranks[0]["report"]["workers"]] == [rank["pid"] for rank in ranks]


@pytest.mark.parametrize(
    ("version", "backend"),
    cases(("v2", "staged"), ("v1", "ipc"), others=[("v1", "staged"), ("v2", "ipc")]),
)
def test_sharded_over_a_restart_and_a_resize(engine_of, alone, version, backend):
    """With FSDP2 two ranks are restarted from a sharded checkpoint, then three resume from theirs, with the weights of one process."""
    ranks = run(engine_of(version), "sharded", backend, fault="raise")
    assert [rank["first"] for rank in ranks] == [2, 2, 4, 4, 4]
    for rank in ranks:
        check_resumed(rank, alone, rank["first"])
    assert sum(rank["rows"] for rank in ranks[:2]) == sum(rank["rows"] for rank in ranks[2:]) == 256


@full
def test_sharded_over_gloo_fails(engine_of):
    """FSDP2 needs staged or ipc.

    torch's Gloo reads device memory on the host if DTensor gathers whole parameters, and before 2.8 a mesh uses NCCL beside it
    (test_meshes.py).
    """
    answer = engine_of("v2").run("sharded", settings={"on_shared_device": "gloo"}, timeout_s=200)
    ending = "ncclInvalidUsage" if MAKES_NCCL else "worker process has died"
    assert ending in str(answer["errors"])


@full
@pytest.mark.skipif(
    not IS_ELASTIC, reason=f"needs a Ray with elastic groups: {ray.__version__} takes no range as num_workers"
)
@pytest.mark.parametrize("backend", ["ipc", "gloo", "staged"])
def test_an_elastic_group_that_loses_a_node(tmp_path, alone, backend):
    """Three ranks on two devices; after the loss of a node two ranks on one device resume from the checkpoint in a new group."""
    engine = Engine("v2", CUDA_RIG_DEVICES="2", CUDA_RIG_STATE=str(tmp_path))
    try:
        ranks = run(engine, "elastic", backend, timeout_s=350)
    finally:
        engine.close()
    three, two = ranks[:3], ranks[3:]
    assert len(two) == 2
    assert [[g["ranks"] for g in each[0]["report"]["plan"]["share_groups"]] for each in (three, two)] == [[[0, 1]]] * 2
    devices = [worker["devices"][0]["uuid"] for worker in three[0]["report"]["workers"]]
    assert (devices[0] == devices[1], devices[1] == devices[2]) == (True, False)
    for rank in two:
        check_resumed(rank, alone, first=2)
    assert not {rank["pid"] for rank in three} & {rank["pid"] for rank in two}


@pytest.mark.parametrize(
    ("version", "backend"), cases(("v2", "ipc"), ("v1", "staged"), others=[("v1", "ipc"), ("v2", "staged")])
)
def test_two_trials_of_tune_on_one_device(engine_of, version, backend):
    """Two trials of two ranks train at the same time, each in its own group."""
    ranks = run(engine_of(version), "tune", backend, fraction=0.25)
    assert len(ranks) == 4
    assert len({rank["report"]["master_port"] for rank in ranks}) == 2
    assert len({worker["devices"][0]["uuid"] for rank in ranks for worker in rank["report"]["workers"]}) == 1
    expected = losses_of_one_process("cuda")
    assert sum(rank["losses"] == pytest.approx(expected, rel=1e-4) for rank in ranks) == 2


@pytest.mark.parametrize(
    ("library", "strategy", "backend"),
    cases(
        ("accelerate", None, "ipc"),
        ("transformers", None, "staged"),
        ("lightning", "ddp", "ipc"),
        ("lightning", "fsdp", "staged"),
        others=[("accelerate", None, "staged"), ("transformers", None, "ipc"), ("lightning", "ddp", "staged")],
    ),
)
@pytest.mark.parametrize("version", ["v2", pytest.param("v1", marks=full)])
def test_libraries(engine_of, version, library, strategy, backend):
    """Accelerate, Transformers and Lightning train to the losses of one process with other backends than Gloo."""
    if find_spec(library) is None:
        pytest.skip(f"needs {library}: ci/cuda.py --libraries")
    ranks = run(engine_of(version), "library", backend, library=library, strategy=strategy)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses_of_one_process("cuda"), rel=1e-4)
        assert rank["device"] == "cuda:0"
        assert rank["model"] == ("FullyShardedDataParallel" if strategy == "fsdp" else "DistributedDataParallel")


@pytest.mark.parametrize(("version", "backend"), cases(("v2", "ipc"), ("v1", "staged")))
def test_a_capped_worker_leaves_its_neighbour_memory(engine_of, version, backend):
    """With limit_gpu_memory a worker that uses too much is refused at its fraction, and the other continues."""
    job = {"settings": {"limit_gpu_memory": True, "on_shared_device": backend}, "fraction": 0.25, "catch": True}
    answer = engine_of(version).run("memory", **job)
    assert answer["errors"] == []
    greedy, neighbour = answer["ranks"]
    assert greedy["refused_at"] == pytest.approx(0.25, abs=0.02)
    assert (greedy["works"], neighbour["works"], neighbour["refused_at"]) == (True, True, None)
