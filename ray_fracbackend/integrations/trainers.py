"""Start every TorchTrainer of a process with FracTorchConfig, for scripts that run unchanged. Driver side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import _ray
from ray_fracbackend.config import FracTorchConfig, frac_config


def replace_torch_config(settings: Mapping[str, Any], announce: Callable[[TorchConfig], None] | None = None) -> None:
    """Start every TorchTrainer that this process creates from now on with FracTorchConfig.

    Args:
        settings: As for :func:`ray_fracbackend.config.frac_config`.
        announce: Called with the configuration of each trainer.

    Raises:
        ValueError: A setting breaks its rule.
    """
    FracTorchConfig(**settings)  # raises for a wrong setting now, not when the script creates its trainer
    TorchTrainer.__init__ = _with_frac_config(TorchTrainer.__init__, settings, announce)


def _with_frac_config(
    init: Callable[..., None], settings: Mapping[str, Any], announce: Callable[[TorchConfig], None] | None
) -> Callable[..., None]:
    # functools.wraps keeps the signature; the V1 engine looks up the argument names in it.
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, torch_config: TorchConfig | None = None, **kwargs: Any) -> None:
        config = frac_config(torch_config, settings)
        init(self, *args, torch_config=config, **kwargs)
        _ray.keep_torch_config(self, config)
        if announce is not None:
            announce(config)

    return __init__
