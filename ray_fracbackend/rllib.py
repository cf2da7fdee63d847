"""Deprecated name of `ray_fracbackend.integrations.rllib`."""

import warnings

from ray_fracbackend.integrations.rllib import learners_use

__all__ = ["learners_use"]

warnings.warn(
    "ray_fracbackend.rllib is deprecated: import learners_use from ray_fracbackend.integrations.rllib",
    DeprecationWarning,
    stacklevel=2,
)
