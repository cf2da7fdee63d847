"""Training on one shared GPU: what stock Ray Train does, that every backend of ours trains to the same losses.

Also limit_gpu_memory, and the device under a worker, which is found by its UUID however CUDA_VISIBLE_DEVICES names it.
"""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec

import pynvml
import pytest

from ray_fracbackend.decide.error_texts import is_invalid_usage, refusal_in
from ray_fracbackend.decide.nccl import NCCL_MULTI_RANK
from ray_fracbackend.decide.worker_info import version_text
from ray_fracbackend.worker.nccl_library import loaded_nccl_version
from tests.cuda.emulated import emulated
from tests.gpu.gpu_engine import Engine
from tests.gpu.gpu_training import losses_of_one_process

NCCL = loaded_nccl_version()
HAS_MULTI_RANK = NCCL is not None and NCCL >= NCCL_MULTI_RANK
needs_multi_rank = pytest.mark.skipif(
    not HAS_MULTI_RANK,
    reason=f"needs NCCL 2.30 or newer, has {version_text(NCCL)}; ci/gpu.sh preloads one from its bundle",
)
BACKENDS = ["gloo", "ipc", pytest.param("nccl", marks=needs_multi_rank)]


@pytest.fixture(scope="module")
def expected():
    """The losses of the same model on the same GPU in one process with the whole batch."""
    return losses_of_one_process("cuda")


def check(answer, expected, backend, num_ranks, model="DistributedDataParallel"):
    """Every rank trained on the GPU with the backend, to the expected losses, and all have the same parameters."""
    told = "\n".join(error["text"] for error in answer["errors"])
    if backend == "ipc" and "the ipc backend cannot be used" in told:
        pytest.skip(f"no ipc on this device: {told.partition('cannot be used: ')[2][:300]}")
    assert answer["errors"] == []
    ranks = answer["ranks"]
    assert len(ranks) == num_ranks
    assert {rank["backend"].removeprefix("cpu:gloo,cuda:") for rank in ranks} == {backend}
    assert {(rank["device"], rank["model"]) for rank in ranks} == {("cuda:0", model)}
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, rel=1e-4)
        if model != "FullyShardedDataParallel":  # else each rank has its part of the parameters
            assert rank["spread"] == 0
        assert [group["ranks"] for group in rank["report"]["plan"]["share_groups"]] == [list(range(num_ranks))]


def test_stock_fails():
    """The baseline: Ray's TorchConfig picks NCCL for two half-GPU workers, and NCCL refuses; with torch 2.15 they stay alive."""
    with closing(Engine("v2")) as engine:
        answer = engine.run("train", stock=True)
    text = "\n".join(error["text"] for error in answer["errors"])
    assert refusal_in(text) or is_invalid_usage(text), text or answer
    print(f"NCCL {version_text(NCCL)} says: {refusal_in(text)}")


@pytest.mark.parametrize(("version", "num_ranks"), [*(("v2", number) for number in (2, 3, 4, 8)), ("v1", 2)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_losses(engines, expected, version, backend, num_ranks):
    """Each backend trains with 2 to 8 ranks on the GPU, under both engines."""
    answer = engines(version).run("train", num_workers=num_ranks, settings={"on_shared_device": backend})
    check(answer, expected, backend, num_ranks)


@pytest.mark.parametrize("version", ["v2", emulated("v1")])
@pytest.mark.parametrize(
    ("library", "strategy", "backend"),
    [
        *((library, None, "gloo") for library in ("accelerate", "transformers")),
        *(
            emulated(library, None, backend)
            for library in ("accelerate", "transformers")
            for backend in ("ipc", "staged")
        ),
        ("lightning", "ddp", "gloo"),
        *(emulated("lightning", "ddp", backend) for backend in ("ipc", "staged")),
        ("lightning", "fsdp", "ipc"),
        emulated("lightning", "fsdp", "staged"),
    ],
)
def test_libraries(engines, expected, version, library, strategy, backend):
    """Each trains on the shared GPU to the same losses: LOCAL_RANK 1 is no index of a device there."""
    if find_spec(library) is None:
        pytest.skip(f"needs {library}: ci/gpu_bundle.sh packs it, ci/cuda.py --libraries installs it")
    settings = {"on_shared_device": backend}
    answer = engines(version).run("library", timeout_s=200, settings=settings, library=library, strategy=strategy)
    check(answer, expected, backend, 2, "FullyShardedDataParallel" if strategy == "fsdp" else "DistributedDataParallel")


@pytest.mark.parametrize(
    ("version", "backend"),
    [("v1", "auto"), ("v2", "auto"), *(emulated(v, backend) for v in ("v1", "v2") for backend in ("ipc", "staged"))],
)
def test_two_tune_trials(engines, expected, version, backend):
    """Two trials of two workers each train on the GPU at one time, each in a group of its own."""
    answer = engines(version).run("tune", timeout_s=200, settings={"on_shared_device": backend}, fraction=0.25)
    assert answer["errors"] == []
    ranks = answer["ranks"]
    found = {rank["backend"].removeprefix("cpu:gloo,cuda:") for rank in ranks}
    assert found <= ({"gloo", "ipc"} if backend == "auto" else {backend})
    assert len(ranks) == 4
    assert len({rank["report"]["master_port"] for rank in ranks}) == 2
    assert len({worker["devices"][0]["uuid"] for rank in ranks for worker in rank["report"]["workers"]}) == 1
    assert sum(rank["losses"] == pytest.approx(expected, rel=1e-4) for rank in ranks) == 2


@needs_multi_rank
def test_nccl_refusal_is_translated():
    """A user who switched the flag off gets one error that names the ranks and the variable."""
    with closing(Engine("v2", NCCL_MULTI_RANK_GPU_ENABLE="0")) as engine:
        answer = engine.run("train", settings={"on_shared_device": "nccl"})
    text = "\n".join(error["text"] for error in answer["errors"])
    assert "refused the start: ranks 0,1 share GPU-" in text
    assert "NCCL_MULTI_RANK_GPU_ENABLE=0" in text


LIMITED = {"limit_gpu_memory": True, "on_shared_device": "gloo"}


@pytest.mark.parametrize(("version", "backend"), [("v2", "gloo"), emulated("v2", "ipc"), emulated("v1", "staged")])
def test_a_capped_worker_leaves_its_neighbour_memory(engines, version, backend):
    """A worker is refused at its fraction of the device, and the other still gets and uses memory of its own."""
    settings = {**LIMITED, "on_shared_device": backend}
    answer = engines(version).run("memory", settings=settings, fraction=0.25, catch=True)
    assert answer["errors"] == []
    greedy, neighbour = answer["ranks"]
    assert greedy["refused_at"] == pytest.approx(0.25, abs=0.02)
    assert (greedy["works"], neighbour["works"], neighbour["refused_at"]) == (True, True, None)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_out_of_memory_of_a_capped_worker_says_why(engines, version):
    """An uncaught out of memory reaches the user of fit() with the cap, the fraction and what to do."""
    answer = engines(version).run("memory", settings=LIMITED, fraction=0.25, catch=False)
    text = "\n".join(error["text"] for error in answer["errors"])
    assert "limit_gpu_memory=True caps this worker at its fraction 0.25" in text
    assert "ask for a larger GPU fraction per worker" in text


NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def first_uuid():
    """UUID of the host's first GPU, as the driver has it."""
    pynvml.nvmlInit()
    try:
        uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    finally:
        pynvml.nvmlShutdown()
    return uuid.decode() if isinstance(uuid, bytes) else uuid


@pytest.mark.parametrize("noset", [None, "1"], ids=["ray sets it", "ray leaves it"])
@pytest.mark.parametrize("form", ["index", "uuid"])
def test_the_device_is_found_by_its_uuid(form, noset):
    """Both ranks report the GPU's own UUID, and the report says that they share it."""
    uuid = first_uuid()
    with closing(Engine("v2", **{"CUDA_VISIBLE_DEVICES": "0" if form == "index" else uuid, NOSET: noset})) as engine:
        answer = engine.run("train", settings={"on_shared_device": "gloo"})
    assert answer["errors"] == []
    report = answer["ranks"][0]["report"]
    assert [worker["devices"][0]["uuid"] for worker in report["workers"]] == [uuid, uuid]
    assert {rank["visible"] for rank in answer["ranks"]} == {"0" if form == "index" else uuid}
    assert [(group["ranks"], group["device_uuid"]) for group in report["plan"]["share_groups"]] == [([0, 1], uuid)]
