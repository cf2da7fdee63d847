"""The device under a worker is found by its UUID, however CUDA_VISIBLE_DEVICES names it."""

from __future__ import annotations

import pynvml
import pytest
import torch

from tests.gpu.gpu_engine import Engine, gpu_missing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu_missing() is not None, reason=str(gpu_missing()))]

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
def test_uuid(form, noset):
    """Both ranks report the GPU's own UUID, and the report says that they share it."""
    uuid = first_uuid()
    engine = Engine("v2", **{"CUDA_VISIBLE_DEVICES": "0" if form == "index" else uuid, NOSET: noset})
    try:
        answer = engine.run("train", settings={"on_shared_device": "gloo"})
    finally:
        engine.close()
    assert answer["errors"] == []
    report = answer["ranks"][0]["report"]
    assert [worker["devices"][0]["uuid"] for worker in report["workers"]] == [uuid, uuid]
    assert {rank["visible"] for rank in answer["ranks"]} == {"0" if form == "index" else uuid}
    assert [(group["ranks"], group["device_uuid"]) for group in report["plan"]["share_groups"]] == [([0, 1], uuid)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_of_their_own():
    """Where nothing is shared, workers train with NCCL and no variable of ours, as stock."""
    engine = Engine("v2", num_gpus=2)
    try:
        answer = engine.run("train", fraction=1)
    finally:
        engine.close()
    assert answer["errors"] == []
    assert {rank["backend"] for rank in answer["ranks"]} == {"nccl"}
    plan = answer["ranks"][0]["report"]["plan"]
    assert (plan["share_groups"], plan["env_defaults"]) == ([], {})
