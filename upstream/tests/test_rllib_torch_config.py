"""Piece 4. Two remote learners on the CPU."""

import pytest

gym = pytest.importorskip("gymnasium", reason="ray[rllib] is not installed")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from upstream.install import as_if_merged  # noqa: E402

import ray  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.train.torch import TorchConfig  # noqa: E402

TORCH_CONFIG = TorchConfig(backend="gloo", init_method="tcp", timeout_s=77)


def config(**settings):
    return PPOConfig().environment("CartPole-v1").learners(num_learners=2, **settings)


def group_timeout_s(learner):
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    return group.options._timeout.total_seconds()


def learner_timeouts_s(algorithm_config):
    group = algorithm_config.build_learner_group(env=gym.make("CartPole-v1"))
    try:
        return [result.get() for result in group.foreach_learner(group_timeout_s)]
    finally:
        group.shutdown()


def test_stock_has_no_knob():
    """Nothing of the learners' process group can be set."""
    with pytest.raises(TypeError, match="torch_config"):
        config(torch_config=TORCH_CONFIG)


def test_wrong_type():
    """A name is not a config."""
    with as_if_merged("rllib_torch_config"):
        with pytest.raises(ValueError, match="must be a `ray.train.torch.TorchConfig`"):
            config(torch_config="gloo")


@pytest.mark.full
def test_learners_use_the_config():
    """The learners' group has the timeout that was asked for, and else Ray's own."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with as_if_merged("rllib_torch_config"):
            assert learner_timeouts_s(config(torch_config=TORCH_CONFIG)) == [77, 77]
            assert learner_timeouts_s(config()) == [1800, 1800]
    finally:
        ray.shutdown()
