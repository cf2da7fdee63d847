"""Training on one shared GPU: what stock Ray Train does, and that every backend of ours trains to the same losses."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ray_fracbackend.decide.error_texts import is_invalid_usage, refusal_in
from ray_fracbackend.decide.nccl import NCCL_MULTI_RANK
from ray_fracbackend.decide.worker_info import version_text
from ray_fracbackend.worker.nccl_library import loaded_nccl_version
from tests.gpu.gpu_engine import gpu_missing
from tests.gpu.gpu_training import losses_of_one_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu_missing() is not None, reason=str(gpu_missing()))]

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
    assert {(rank["backend"], rank["device"], rank["model"]) for rank in ranks} == {(backend, "cuda:0", model)}
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, rel=1e-4)
        if model != "FullyShardedDataParallel":  # else each rank has its part of the parameters
            assert rank["spread"] == 0
        assert [group["ranks"] for group in rank["report"]["plan"]["share_groups"]] == [list(range(num_ranks))]


def test_stock_fails(engines):
    """The baseline: Ray's own TorchConfig picks NCCL for two half-GPU workers, and NCCL refuses."""
    answer = engines("v2").run("train", stock=True)
    text = "\n".join(error["text"] for error in answer["errors"])
    assert refusal_in(text) or is_invalid_usage(text), text or answer
    print(f"NCCL {version_text(NCCL)} says: {refusal_in(text)}")


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_losses(engines, expected, backend, num_ranks):
    """Each backend trains with 2 to 8 ranks on the GPU, under the V2 engine."""
    answer = engines("v2").run("train", num_workers=num_ranks, settings={"on_shared_device": backend})
    check(answer, expected, backend, num_ranks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_losses_under_v1(engines, expected, backend):
    """The V1 engine gives the same."""
    answer = engines("v1").run("train", settings={"on_shared_device": backend})
    check(answer, expected, backend, 2)


def test_auto(engines, expected):
    """The default starts, without a word about NCCL's refusal."""
    answer = engines("v2").run("train")
    assert answer["errors"] == []
    assert answer["ranks"][0]["backend"] in ("gloo", "ipc")
    assert answer["ranks"][0]["losses"] == pytest.approx(expected, rel=1e-4)


def needs(library):
    return pytest.mark.skipif(find_spec(library) is None, reason=f"needs {library}; ci/gpu_bundle.sh packs it")


@pytest.mark.parametrize(
    ("library", "strategy", "backend", "model"),
    [
        pytest.param("accelerate", None, "gloo", "DistributedDataParallel", marks=needs("accelerate")),
        pytest.param("transformers", None, "gloo", "DistributedDataParallel", marks=needs("transformers")),
        pytest.param("lightning", "ddp", "gloo", "DistributedDataParallel", marks=needs("lightning")),
        pytest.param("lightning", "fsdp", "ipc", "FullyShardedDataParallel", marks=needs("lightning")),
    ],
)
def test_libraries(engines, expected, library, strategy, backend, model):
    """Each trains on the shared GPU to the same losses: LOCAL_RANK 1 is no index of a device there."""
    settings = {"on_shared_device": backend}
    answer = engines("v2").run("library", settings=settings, library=library, strategy=strategy)
    check(answer, expected, backend, 2, model)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_two_tune_trials(engines, expected, version):
    """Two trials of two workers each train on the GPU at one time."""
    answer = engines(version).run("tune", timeout_s=150, fraction=0.25)
    assert answer["errors"] == []
    assert len(answer["ranks"]) == 4
    assert len({tuple(rank["losses"]) for rank in answer["ranks"]}) == 2
    assert len({rank["report"]["workers"][0]["devices"][0]["uuid"] for rank in answer["ranks"]}) == 1
    assert any(rank["losses"] == pytest.approx(expected, rel=1e-4) for rank in answer["ranks"])


@pytest.mark.skipif(HAS_MULTI_RANK, reason="the loaded NCCL has the multi-rank flags")
def test_too_old_a_library_is_an_error(engines):
    """on_shared_device='nccl' with an older NCCL says which version is needed."""
    answer = engines("v2").run("train", settings={"on_shared_device": "nccl"})
    text = "\n".join(error["text"] for error in answer["errors"])
    assert "need NCCL 2.30 or newer" in text


@needs_multi_rank
def test_nccl_refusal_is_translated(engines):
    """A user who switched the flag off gets one error that names the ranks and the variable."""
    engine = type(engines("v2"))("v2", NCCL_MULTI_RANK_GPU_ENABLE="0")
    try:
        answer = engine.run("train", settings={"on_shared_device": "nccl"})
    finally:
        engine.close()
    text = "\n".join(error["text"] for error in answer["errors"])
    assert "refused the start: ranks 0,1 share GPU-" in text
    assert "NCCL_MULTI_RANK_GPU_ENABLE=0" in text
