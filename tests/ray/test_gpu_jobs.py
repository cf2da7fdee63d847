"""The jobs of the GPU tests on CPU workers: Gloo, ipc, Tune and the libraries train to the same losses."""

from __future__ import annotations

import pytest

from ray_fracbackend.ipc import host_memory_support
from tests.gpu.gpu_engine import Engine
from tests.gpu.gpu_training import losses_of_one_process

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SETTINGS = {"on_missing_cuda": "cpu"}
_BOUND_S = 400.0


@pytest.fixture(scope="module", params=["v1", "v2"])
def engine(request):
    found = Engine(request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def expected():
    return losses_of_one_process("cpu")


def test_same_losses(engine, expected):
    """Two and three ranks train to the losses of one process with the whole batch."""
    policies = {2: "gloo"} if host_memory_support() else {2: "gloo", 3: "ipc"}
    for num_ranks, policy in policies.items():
        settings = {**SETTINGS, "on_shared_device": policy}
        answer = engine.run("train", timeout_s=_BOUND_S, num_workers=num_ranks, settings=settings)
        assert answer["errors"] == []
        assert [(rank["backend"], rank["spread"]) for rank in answer["ranks"]] == [(policy, 0.0)] * num_ranks
        assert all(rank["losses"] == pytest.approx(expected, rel=1e-4) for rank in answer["ranks"])


@pytest.mark.parametrize("library", ["accelerate", "transformers", "lightning"])
def test_libraries(engine, expected, library):
    """Each library finds the ranks by itself, and they train to the losses of one process."""
    answer = engine.run("library", timeout_s=_BOUND_S, settings=SETTINGS, library=library, strategy="ddp")
    assert answer["errors"] == []
    found = [(rank["model"], rank["device"], rank["spread"]) for rank in answer["ranks"]]
    assert found == [("DistributedDataParallel", "cpu", 0.0)] * 2
    assert all(rank["losses"] == pytest.approx(expected, rel=1e-4) for rank in answer["ranks"])


def test_two_tune_trials(engine, expected):
    """Two trials of two workers each train at the same time."""
    answer = engine.run("tune", timeout_s=_BOUND_S, settings=SETTINGS, fraction=0.25)
    assert answer["errors"] == []
    assert len(answer["ranks"]) == 4
    assert any(rank["losses"] == pytest.approx(expected, rel=1e-4) for rank in answer["ranks"])


def test_failure_is_reported(engine):
    """An error of a job is returned with its causes, and the engine continues."""
    answer = engine.run("train", timeout_s=_BOUND_S)
    assert any("on_missing_cuda='cpu'" in error["text"] for error in answer["errors"])


def test_hang_costs_its_own_time_only():
    """A job over its time limit is killed with its Ray, and the next one gets a new one."""
    engine = Engine("v2")
    try:
        with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
            engine.run("train", timeout_s=0.1, settings=SETTINGS)
        assert engine.run("nothing", timeout_s=60.0)["errors"][0]["type"] == "KeyError"
    finally:
        engine.close()
