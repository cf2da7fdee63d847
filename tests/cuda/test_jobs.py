"""Uses of Ray Train with CUDA tensors on shared devices and every backend: restarts, checkpoints, FSDP2, elastic groups.

tests/gpu/test_gpu_training.py contains the rest: the losses of each backend, libraries and Tune.
"""

from __future__ import annotations

from contextlib import closing

import pytest
import ray
import torch
from ray.train import ScalingConfig

from tests.cuda import cuda_jobs
from tests.cuda.emulated import MAKES_NCCL
from tests.gpu.gpu_engine import Engine, engines_by_version

pytestmark = pytest.mark.timeout(400)

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
    """Return engines by version, each with a Ray on a machine with one device."""

    def variables():
        return {"CUDA_RIG_DEVICES": "1", "CUDA_RIG_STATE": str(tmp_path_factory.mktemp("machine"))}

    with engines_by_version(variables) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone():
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
    (test_nccl.py).
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
    """Three ranks on two devices; after the loss of a node two ranks on one device resume from the checkpoint in a new group, which the report is of."""
    with closing(Engine("v2", CUDA_RIG_DEVICES="2", CUDA_RIG_STATE=str(tmp_path))) as engine:
        ranks = run(engine, "elastic", backend, timeout_s=350)
        saved = engine.start_report()
    three, two = ranks[:3], ranks[3:]
    assert len(two) == 2
    assert [[g["ranks"] for g in each[0]["report"]["plan"]["share_groups"]] for each in (three, two)] == [[[0, 1]]] * 2
    devices = [worker["devices"][0]["uuid"] for worker in three[0]["report"]["workers"]]
    assert (devices[0] == devices[1], devices[1] == devices[2]) == (True, False)
    for rank in two:
        check_resumed(rank, alone, first=2)
    assert not {rank["pid"] for rank in three} & {rank["pid"] for rank in two}
    assert three[0]["report"]["master_port"] != two[0]["report"]["master_port"] == saved["master_port"]
