"""Piece 5. Two Ray nodes on this machine; Gloo's interface of one does not exist."""

from dataclasses import dataclass
from typing import Any

import pytest

from upstream.collective_preflight import CollectivePreflight, poll_in_process
from upstream.collective_probe import CollectiveProbe, ids_of
from upstream.health_contract import PushContext
from upstream.install import as_if_merged

import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError

NO_INTERFACE = "absent0"


@pytest.fixture(scope="class")
def two_nodes():
    """A cluster of a good node and of one whose network is set up wrong."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    bad = cluster.add_node(num_cpus=1, env_vars={"GLOO_SOCKET_IFNAME": NO_INTERFACE})
    cluster.wait_for_nodes()
    yield cluster.address, bad.node_id
    cluster.shutdown()


def fit(tmp_path):
    """Training on both nodes; the error, and whether any worker had begun to train."""
    begun = tmp_path / "begun"

    def train_func():
        begun.touch()

    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo", timeout_s=20),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(TrainingFailedError) as raised:
        trainer.fit()
    assert not begun.exists()
    return str(raised.value)


@pytest.mark.full
class TestTwoNodes:
    """A run of Ray Train on both nodes."""

    def test_stock_does_not_name_the_node(self, two_nodes, tmp_path):
        """Ray ends in what Gloo says, from within its start, and no node is named."""
        address, bad_node_id = two_nodes
        ray.init(address=address)
        try:
            error = fit(tmp_path)
        finally:
            ray.shutdown()
        assert NO_INTERFACE in error
        assert bad_node_id not in error

    def test_preflight_names_the_node(self, two_nodes, tmp_path):
        """The probe ends the run before any process group, with a verdict on each node."""
        address, bad_node_id = two_nodes
        with as_if_merged("collective_probe") as runtime_env:
            ray.init(address=address, runtime_env=runtime_env)
            try:
                error = fit(tmp_path)
            finally:
                ray.shutdown()
        assert "_setup_torch_process_group" not in error
        assert f"node {bad_node_id}: FAILED" in error
        assert error.count("FAILED") == 1
        assert error.count("not at fault") == 1


@pytest.mark.parametrize(
    "nodes",
    [
        ["b", "a"],
        {"b": [1], "a": [0]},
        [PushContext("b", [], 1), PushContext("a", [], 1)],
    ],
    ids=["ids", "dict", "objects"],
)
def test_forms_of_nodes(nodes):
    """Every form of the nodes that a draft of the contract has had gives one order."""
    assert ids_of(nodes) == ["a", "b"]


@dataclass
class Metadata:
    node_id: str


@dataclass
class Worker:
    """A worker of Ray Train, as far as the preflight looks at it."""

    metadata: Metadata
    actor: Any

    def execute_async(self, fn, *args):
        return self.actor.call.remote(fn, *args)


@ray.remote(num_cpus=0)
class Caller:
    def call(self, fn, *args):
        return fn(*args)


@pytest.fixture(scope="class")
def local_ray():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.full
class TestProbe:
    """The probe itself, on this machine alone."""

    def test_healthy_nodes_pass(self, local_ray):
        """Three nodes that work prove it to each other with real collectives."""
        workers = [Worker(Metadata(name), Caller.remote()) for name in "abc"]
        results = CollectivePreflight().probe_nodes(workers)
        assert [result.passed for result in results.values()] == [True] * 3
        assert all(
            result.metrics["all_reduce_latency_s"] > 0 for result in results.values()
        )
        assert "gloo on cpu: 3 ranks verified" in results["a"].detail

    def test_absent_node_is_named(self, local_ray):
        """A node that never comes is named by the others, in their time."""
        probe = CollectiveProbe(timeout_s=4)
        context = PushContext("a", ["a", "b"], timeout_s=4)
        result = ray.get(Caller.remote().call.remote(poll_in_process, probe, context))
        assert result.passed is None
        assert result.events == ["start_timeout"]
        assert "ranks [1] did not come" in result.detail
        assert "rank 1 is node b" in result.detail

    def test_store_stays_with_its_maker(self, local_ray):
        """What travels to the nodes is the place of the board, not the board."""
        probe = CollectiveProbe(timeout_s=5)
        assert set(probe.__getstate__()) == {"backend", "timeout_s", "_board_at"}
