"""Every training library, one after the other in one fit; --full runs each separately and compares it with Gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.ray import test_fsdp_dcp as fsdp
from tests.ray import test_huggingface as huggingface
from tests.ray.test_lightning import CONFIG as LIGHTNING
from tests.ray.training_runs import NO_IPC, assert_close, assert_equal_on_ranks, run, told_in, train_example

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.full, NO_IPC]

TRANSFORMERS = {"example": "transformers_trainer", "batch_size": huggingface.BATCH_SIZE, **huggingface.CONFIG}
LIBRARIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fsdp": (fsdp.train_sharded, {"steps": range(fsdp.STEPS), "checkpoint": None}),
    "accelerate": (huggingface.train_accelerate, {}),
    "transformers": (train_example, TRANSFORMERS),
    "lightning": (train_example, {**LIGHTNING, "epochs": 1}),
}


def train_with_each(config: dict[str, Any]) -> None:
    """Train like each library's own test, with a separate results folder for each."""
    for name, (train, settings) in LIBRARIES.items():
        out = os.path.join(config["out"], name)
        os.makedirs(out, exist_ok=True)
        train({**config, **settings, "out": out})


def test_ranks_agree_with_every_library(tmp_path):
    """FSDP2 with DCP, Accelerate, Transformers and Lightning train with ``ipc``; their ranks end with equal weights."""
    run(train_with_each, tmp_path, "ipc")
    told = {name: told_in(tmp_path / name, "ipc", 2) for name in LIBRARIES}
    for ranks in told.values():
        assert_equal_on_ranks(ranks)
    single = fsdp.make_model()
    fsdp.train_steps(single, fsdp.optimizer_of(single), range(fsdp.STEPS))
    assert_close(told["fsdp"][0]["state"], dict(single.named_parameters()))
    assert sum(rank["rows"] for rank in told["fsdp"]) == 16
    assert [rank["gathered"] for rank in told["accelerate"]] == [[0, 1]] * 2
    assert all(torch.isfinite(value).all() for ranks in told.values() for value in ranks[0]["state"].values())
