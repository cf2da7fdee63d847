"""Start every TorchTrainer of a process with FracTorchConfig, for scripts that run unchanged. Driver side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import _ray
from ray_fracbackend.config import FracTorchConfig, frac_config

_Announce = Callable[[TorchConfig, TorchTrainer, bool], None]
_AroundFit = Callable[[TorchTrainer], AbstractContextManager[None]]


def replace_torch_config(
    settings: Mapping[str, Any], announce: _Announce | None = None, around_fit: _AroundFit | None = None
) -> None:
    """Start every TorchTrainer that this process creates from now on with FracTorchConfig.

    Args:
        settings: As for :func:`ray_fracbackend.config.frac_config`.
        announce: Called with the configuration of each trainer, the trainer, and whether the configuration is the script's own.
        around_fit: Creates the context in which each trainer fits.

    Raises:
        ValueError: A setting breaks its rule.
    """
    FracTorchConfig(**settings)  # raises for a wrong setting now, not when the script creates its trainer
    TorchTrainer.__init__ = _with_frac_config(TorchTrainer.__init__, settings, announce)
    if around_fit is not None:
        TorchTrainer.fit = _inside(around_fit, TorchTrainer.fit)


def _inside(around: _AroundFit, fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def wrapped(self: Any) -> Any:
        with around(self):
            return fit(self)

    return wrapped


def _with_frac_config(
    init: Callable[..., None], settings: Mapping[str, Any], announce: _Announce | None
) -> Callable[..., None]:
    # functools.wraps keeps the signature; the V1 engine looks up the argument names in it.
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, torch_config: TorchConfig | None = None, **kwargs: Any) -> None:
        config = frac_config(torch_config, settings)
        init(self, *args, torch_config=config, **kwargs)
        _ray.keep_torch_config(self, config)
        if announce is not None:
            announce(config, self, config is torch_config)

    return __init__
