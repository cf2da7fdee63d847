"""Ray Train V2's replica groups: on_start is called once a group, with some of the workers."""

from __future__ import annotations

import pytest
import ray

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.backend import FracTorchBackend
from tests.ray.conftest import import_package

replica = pytest.importorskip(
    "ray.train.v2._internal.execution.worker_group.execution_group", reason="this Ray has no replica groups"
)


def identity():
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


@pytest.mark.full
@pytest.mark.usefixtures("cluster")
def test_each_replica_group_is_a_job_of_its_own(monkeypatch):
    """A group of two workers and one of one get process groups of those sizes."""
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker

    from ray_fracbackend import _ray

    # RANK, WORLD_SIZE, LOCAL_RANK, ... come from a train context, which only a whole V2 run has.
    monkeypatch.setattr(_ray, "sets_env_before_init", lambda worker_group: False)
    actors = [ray.remote(num_cpus=1)(RayTrainWorker).remote() for _ in range(3)]
    workers = [Worker(actor, ray.get(actor.get_metadata.remote()), {"CPU": 1}) for actor in actors]
    groups = [replica.ReplicaGroup(workers[:2], {"CPU": 1}), replica.ReplicaGroup(workers[2:], {"CPU": 1})]
    for group in groups:
        group.execute(import_package)
        FracTorchBackend().on_start(group, FracTorchConfig())
    found = [group.execute(identity) for group in groups]
    assert found == [[(0, 2, "gloo"), (1, 2, "gloo")], [(0, 1, "gloo")]]
    for actor in actors:
        ray.kill(actor)
