"""Use FracTorchConfig for the learners of RLlib, whose torch configuration cannot be set."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from ray.train.torch import TorchConfig

from ray_fracbackend import _ray


@contextmanager
def learners_use(torch_config: TorchConfig) -> Iterator[None]:
    """Use this configuration for the remote torch learners of algorithms that are built inside the context.

    RLlib creates the learners in the process that builds the algorithm, so use the context there: in the driver for
    ``AlgorithmConfig.build_algo()``, in the trial for an algorithm that Tune runs. Restarts of the learners within the
    context also use the configuration. So do other threads that build algorithms at that time.

    Args:
        torch_config: A ``TorchConfig`` or a subclass such as ``FracTorchConfig``.

    Raises:
        ValueError: ``torch_config`` is not a TorchConfig.
    """
    if not isinstance(torch_config, TorchConfig):
        raise ValueError(
            f"learners_use({torch_config!r}): it must be a ray.train.torch.TorchConfig, such as FracTorchConfig()."
        )
    with _ray.learner_backend_config(for_learners(torch_config)):
        yield


def for_learners(torch_config: TorchConfig) -> TorchConfig:
    """Copy a configuration so that its workers see only their own devices.

    RLlib's learners never use each other's GPUs, and place their modules on the first visible one.

    Args:
        torch_config: The configuration, of any subclass.
    """
    changed = copy.copy(torch_config)
    changed.__class__ = _learner_class(torch_config.backend_cls, type(torch_config))  # type: ignore[arg-type]
    return changed


# Ray keeps every backend class that it has started for the life of the process.
@functools.cache
def _learner_class(backend_cls: type, config_cls: type) -> type:
    class _RLlibTorchBackend(backend_cls):  # type: ignore[misc]
        share_cuda_visible_devices = False

    class RLlibTorchConfig(config_cls):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type:
            return _RLlibTorchBackend

    return RLlibTorchConfig
