"""Piece 3. One of two real workers is stopped, as a node that swaps to death is."""

import os
import signal
import threading

import pytest
import torch.distributed as dist
from ray_fracbackend.errors import StartTimeoutError, WorkerDiedError

from upstream.bounded_start import TORCH_PROCESS_GROUP_START_TIMEOUT_S
from upstream.install import as_if_merged

import ray
from ray.train._internal.worker_group import WorkerGroup
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

BUDGET_S = 3
# Budget, the wait for the workers' own word, and a busy machine.
BOUND_S = BUDGET_S + 15


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def two_workers():
    """Two workers that have imported torch."""
    group = WorkerGroup(num_workers=2, resources_per_worker={"CPU": 1})
    group.execute(dist.is_available)
    yield group
    group.shutdown(patience_s=0)


# One for the tests that share them, one for those that end a worker.
healthy = pytest.fixture(scope="module")(two_workers)
workers = pytest.fixture(two_workers)


class Start(threading.Thread):
    """A start in the background, as one that may never end."""

    def __init__(self, group, config):
        super().__init__(daemon=True)
        self.group, self.config = group, config
        self.error = None
        self.start()

    def run(self):
        try:
            _TorchBackend().on_start(self.group, self.config)
        except Exception as error:
            self.error = error


def start_with_a_stopped_worker(workers):
    """What a start has come to within the bound while rank 1 does not run."""
    pid = workers.workers[1].metadata.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        start = Start(workers, TorchConfig(backend="gloo", timeout_s=BUDGET_S))
        start.join(BOUND_S)
        return start.is_alive(), start.error
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_stock_hangs(workers):
    """The start neither ends nor says which rank it waits for."""
    assert start_with_a_stopped_worker(workers) == (True, None)


@pytest.mark.full
def test_hung_rank_is_named(workers):
    """The start ends by its budget with the rank, its node and its process."""
    pid = workers.workers[1].metadata.pid
    with as_if_merged("bounded_start"):
        alive, error = start_with_a_stopped_worker(workers)
    assert not alive
    assert isinstance(error, StartTimeoutError)
    assert f"rank 1 (node {ray.util.get_node_ip_address()}, pid {pid})" in str(error)
    assert error.ranks == (1,)


@pytest.mark.full
def test_dead_rank_is_named(workers):
    """A worker that dies in its start is named, where V1 would raise None for Ray's own."""
    with as_if_merged("bounded_start"):
        os.kill(workers.workers[1].metadata.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="rank 1 .* died during start-up"):
            _TorchBackend().on_start(workers, TorchConfig(backend="gloo"))


@pytest.mark.full
def test_good_start_is_as_before(healthy, monkeypatch):
    """A start that works ends in the same group, and the group of workers is whole."""
    monkeypatch.setenv(TORCH_PROCESS_GROUP_START_TIMEOUT_S, "60")
    with as_if_merged("bounded_start"):
        _TorchBackend().on_start(healthy, TorchConfig(backend="gloo"))
    assert healthy.execute(dist.get_world_size) == [2, 2]
    assert "execute" not in vars(healthy)
    _TorchBackend().on_shutdown(healthy, TorchConfig())


@pytest.mark.full
def test_worker_error_is_told(healthy):
    """What torch says on a worker is in the error, with rank and node."""
    told = r"rank 0 \(node .*\), rank 1 \(node .*\): .*NCCL built in"
    with as_if_merged("bounded_start"):
        with pytest.raises(RuntimeError, match=told):
            _TorchBackend().on_start(healthy, TorchConfig(backend="nccl"))
