"""Behaviour: a worker group that grows and shrinks."""

import time

import pytest
import torch
import torch.distributed as dist

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, ScalingConfig
from ray.train.torch import TorchTrainer


@pytest.fixture
def cluster():
    """Start a head node without room for workers and a node with room for two."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@ray.remote(num_cpus=0)
class Sizes:
    """Record the sizes of the worker group in order."""

    def __init__(self):
        self.seen, self.ended = [], False

    def add(self, size):
        if size not in self.seen[-1:]:
            self.seen.append(size)
        return self.ended

    def get(self):
        return self.seen

    def end(self):
        self.ended = True


def train_func(config):
    """Sum ones until the run ends; every rank ends in the same step."""
    ended = torch.zeros(1)
    while not ended:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        if dist.get_rank() == 0:
            ended += float(ray.get(config["sizes"].add.remote(dist.get_world_size())))
        dist.broadcast(ended, 0)
        ray.train.report({"world_size": dist.get_world_size()})
        time.sleep(0.1)
    return dist.get_world_size()


def wait_for_size(sizes, size, timeout_s=90):
    end = time.monotonic() + timeout_s
    while ray.get(sizes.get.remote())[-1:] != [size]:
        assert time.monotonic() < end, ray.get(sizes.get.remote())
        time.sleep(0.2)


@ray.remote(num_cpus=0)
def fit(sizes, storage_path):
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"sizes": sizes},
        scaling_config=ScalingConfig(
            num_workers=(1, 3), elastic_resize_monitor_interval_s=1
        ),
        run_config=ray.train.RunConfig(
            storage_path=storage_path, failure_config=FailureConfig(max_failures=2)
        ),
    )
    return trainer.fit().return_value


def test_grow_and_shrink(cluster, tmp_path):
    """The group has two workers, three when a node joins, two when it is lost."""
    sizes = Sizes.remote()
    run = fit.remote(sizes, str(tmp_path))
    wait_for_size(sizes, 2)
    extra = cluster.add_node(num_cpus=1)
    wait_for_size(sizes, 3)
    cluster.remove_node(extra)
    wait_for_size(sizes, 2)
    ray.get(sizes.end.remote())
    assert ray.get(run) == 2
