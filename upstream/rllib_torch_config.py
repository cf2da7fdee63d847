"""Piece 4: choose the torch process group of RLlib's learners.

Goes into ``ray/rllib/core/learner/learner_group.py`` and
``ray/rllib/algorithms/algorithm_config.py``. Moves ``for_learners`` of ``rllib``.
"""

from contextvars import ContextVar
from typing import Any, Callable, Optional, Type

from ray_fracbackend.integrations.rllib import for_learners

from ray.train.torch import TorchConfig

# The setting of the LearnerGroup that is being built in this thread.
_asked: ContextVar[Optional[TorchConfig]] = ContextVar("torch_config", default=None)


def learners(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AlgorithmConfig.learners`` with one setting more, ``torch_config``.

    It takes a ``TorchConfig`` or a subclass for the process group between remote torch
    learners; None, the default, means ``TorchConfig()`` as before.
    """

    def learners(
        self: Any, *, torch_config: Optional[TorchConfig] = None, **kwargs: Any
    ) -> Any:
        if torch_config is not None:
            if not isinstance(torch_config, TorchConfig):
                raise ValueError(
                    f"`torch_config` ({torch_config!r}) must be a "
                    "`ray.train.torch.TorchConfig`."
                )
            self.torch_config = torch_config
        return original(self, **kwargs)

    return learners


def learner_group_init(original: Callable[..., None]) -> Callable[..., None]:
    """``LearnerGroup.__init__`` that hands the setting on."""

    def __init__(self: Any, *, config: Any, **kwargs: Any) -> None:
        token = _asked.set(getattr(config, "torch_config", None))
        try:
            original(self, config=config, **kwargs)
        finally:
            _asked.reset(token)

    return __init__


def get_backend_config(original: Callable[[Type], Any]) -> Callable[[Type], Any]:
    """``_get_backend_config`` that starts from the given config where there is one."""

    def _get_backend_config(learner_class: Type) -> Any:
        torch_config = _asked.get()
        if torch_config is None or learner_class.framework != "torch":
            return original(learner_class)
        return for_learners(torch_config)

    return _get_backend_config
