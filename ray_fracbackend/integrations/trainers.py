"""Start every TorchTrainer of a process with FracTorchConfig, for scripts that run unchanged. Driver side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ray.train.backend import BackendConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import _ray
from ray_fracbackend.config import FracTorchConfig
from ray_fracbackend.log import logger


def frac_config(config: TorchConfig | None, settings: Mapping[str, Any]) -> TorchConfig:
    """Return the configuration to use instead of a script's own.

    Args:
        config: The script's own, None if it has none. A FracTorchConfig is used unchanged, and so is the configuration of any
            other backend.
        settings: Settings of FracTorchConfig that override the script's.

    Raises:
        TypeError: ``config`` is not a configuration, such as a class or a dict.
        ValueError: A setting breaks its rule.
    """
    if not config:  # as TorchTrainer reads it
        return FracTorchConfig(**settings)
    if not isinstance(config, BackendConfig):
        raise TypeError(f"torch_config={config!r} must be an object such as FracTorchConfig().")
    if type(config) is not TorchConfig:
        if not isinstance(config, FracTorchConfig):
            logger.warning(
                "%s is used unchanged: FracTorchConfig replaces only plain TorchConfig objects", type(config).__name__
            )
        return config
    own = {each.name: getattr(config, each.name) for each in fields(TorchConfig) if each.init}
    return FracTorchConfig(**{**own, **settings})


def replace_torch_config(
    settings: Mapping[str, Any], announce: Callable[[TorchConfig, bool], None] | None = None
) -> None:
    """Start every TorchTrainer that this process creates from now on with FracTorchConfig.

    Args:
        settings: As for `frac_config`.
        announce: Called with the configuration of each trainer, and whether it is the script's own.
    """
    init = TorchTrainer.__init__

    # functools.wraps keeps the signature; the V1 engine looks up the argument names in it.
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, torch_config: TorchConfig | None = None, **kwargs: Any) -> None:
        config = frac_config(torch_config, settings)
        init(self, *args, torch_config=config, **kwargs)
        _ray.keep_torch_config(self, config)
        if announce is not None:
            announce(config, config is torch_config)

    TorchTrainer.__init__ = __init__
