"""Elastic worker groups (V2): after the loss of a node a smaller group starts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_fracbackend import FracTorchConfig
from ray_fracbackend._ray import v2_enabled
from tests.ray.conftest import HALF_GPU

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not v2_enabled(), reason="elastic worker groups are of the V2 engine"),
]
_WAIT_S = 300.0


@pytest.fixture
def cluster(no_cluster):
    """A head with room for two halves, and a node with room for a third."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "num_gpus": 1})
    lost = cluster.add_node(num_cpus=1, num_gpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, lost
    ray.shutdown()
    cluster.shutdown()


def train_func(config):
    """Report the start; with three ranks, wait to be killed."""
    import torch
    import torch.distributed as dist

    from ray_fracbackend import get_start_report

    size = dist.get_world_size()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    if dist.get_rank() == 0:
        Path(config["folder"], f"{size}.json").write_text(get_start_report().to_json())
    while size == 3:
        time.sleep(0.1)
    ray.train.report({"size": size})


@ray.remote(num_cpus=0)
def fit(folder):
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"folder": folder},
        torch_config=FracTorchConfig(on_missing_cuda="cpu"),
        scaling_config=ScalingConfig(num_workers=(2, 3), use_gpu=True, resources_per_worker=HALF_GPU),
        run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=5)),
    )
    trainer.fit()


def test_a_smaller_group_starts_again(cluster, tmp_path):
    """Three ranks, then two after a node is lost: with a new plan, new workers and a new port, and the report in the results folder."""
    cluster, lost = cluster
    run = fit.remote(str(tmp_path))
    end = time.monotonic() + _WAIT_S
    while not (tmp_path / "3.json").exists():
        assert time.monotonic() < end, "three ranks never started"
        time.sleep(0.2)
    cluster.remove_node(lost, allow_graceful=False)
    ray.get(run, timeout=_WAIT_S)
    first, second, saved = (
        json.loads(path.read_text())
        for path in (tmp_path / "3.json", tmp_path / "2.json", tmp_path / "run" / "start_report.json")
    )
    assert [worker["rank"] for worker in first["workers"]] == [0, 1, 2]
    assert [worker["rank"] for worker in second["workers"]] == [0, 1]
    assert not {worker["pid"] for worker in first["workers"]} & {worker["pid"] for worker in second["workers"]}
    assert first["master_port"] != second["master_port"]
    assert len({worker["node_id"] for worker in first["workers"]}) == 2
    assert len({worker["node_id"] for worker in second["workers"]}) == 1
    assert saved["master_port"] == second["master_port"]
