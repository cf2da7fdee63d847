"""Behaviour: arguments of TorchConfig and TorchTrainer."""

import pytest

from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_func():
    pass


class TestDriver:
    """The trainer on the driver, before any worker exists."""

    def test_config_positions(self):
        """The three settings keep their positions."""
        config = TorchConfig("gloo", "tcp", 5)
        assert (config.backend, config.init_method, config.timeout_s) == (
            "gloo",
            "tcp",
            5,
        )

    @pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
    def test_explicit_backend_is_kept(self, backend):
        """An explicit backend is passed to the workers."""
        config = TorchConfig(backend=backend)
        trainer = TorchTrainer(
            train_func,
            torch_config=config,
            scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
        )
        assert trainer.backend_config is config
        assert config.backend == backend

    def test_trainer_without_config(self):
        """The config is optional, and the loop can be a keyword argument."""
        trainer = TorchTrainer(train_loop_per_worker=train_func)
        assert isinstance(trainer.backend_config, TorchConfig)

    def test_wrong_scaling(self):
        """Contradicting resources raise an error as before."""
        with pytest.raises(ValueError, match="`use_gpu` is False but `GPU` was found"):
            ScalingConfig(num_workers=2, resources_per_worker={"GPU": 1})

    def test_wrong_argument(self):
        """An unknown argument of the trainer raises a TypeError as before."""
        with pytest.raises(TypeError):
            TorchTrainer(train_func, torch_configuration=TorchConfig())
