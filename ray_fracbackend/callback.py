"""Deprecated name of `ray_fracbackend.integrations.callback`."""

import warnings

from ray_fracbackend.integrations.callback import FracTorchCallback

__all__ = ["FracTorchCallback"]

warnings.warn(
    "ray_fracbackend.callback is deprecated: import FracTorchCallback from ray_fracbackend.integrations.callback",
    DeprecationWarning,
    stacklevel=2,
)
