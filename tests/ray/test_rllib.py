"""RLlib's learners with FracTorchConfig. The tests import RLlib, because that takes seconds in every process that collects."""

from __future__ import annotations

import pytest
from ray.train.torch import TorchConfig

from ray_fracbackend import FracTorchConfig


def start_of(learner):
    """Return what a learner's process knows of its group."""
    import torch.distributed as dist

    from ray_fracbackend import get_start_report

    report = get_start_report()
    return dist.get_backend(), dist.get_world_size(), report.verification.world_size, report.reason


@pytest.mark.full
def test_learners_are_started_and_verified(cluster):
    """Two remote learners have our group inside the context, and RLlib's own outside."""
    import gymnasium
    from ray.rllib.algorithms.ppo import PPOConfig

    from ray_fracbackend.integrations.rllib import learners_use

    config = PPOConfig().environment("CartPole-v1").learners(num_learners=2)
    with learners_use(FracTorchConfig()):
        group = config.build_learner_group(env=gymnasium.make("CartPole-v1"))
    try:
        found = [result.get() for result in group.foreach_learner(start_of)]
    finally:
        group.shutdown()
    assert found == [("gloo", 2, 2, "using gloo (no GPUs were asked for)")] * 2
    from ray.rllib.core.learner import learner_group

    assert learner_group._get_backend_config.__module__ == learner_group.__name__


def test_wrong_type():
    """A string is not a configuration."""
    from ray_fracbackend.integrations.rllib import learners_use

    with pytest.raises(ValueError, match=r"learners_use\('gloo'\).*such as FracTorchConfig\(\)"), learners_use("gloo"):
        pass


def test_subclasses_keep_their_backend():
    """A configuration of another class starts with its own backend, on its own devices only."""
    from ray_fracbackend.integrations.rllib import for_learners

    class Backend(TorchConfig().backend_cls):
        pass

    class Config(TorchConfig):
        backend_cls = Backend

    changed = for_learners(Config(backend="gloo", timeout_s=5))
    # Ray keeps every class: all algorithms use the same.
    assert {type(for_learners(Config())) for _ in range(3)} == {type(changed)}
    assert isinstance(changed, Config)
    assert (changed.backend, changed.timeout_s) == ("gloo", 5)
    assert issubclass(changed.backend_cls, Backend)
    assert changed.backend_cls.share_cuda_visible_devices is False
    assert Backend.share_cuda_visible_devices is True
