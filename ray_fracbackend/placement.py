"""Deprecated name of `ray_fracbackend.cli.plan`."""

import warnings

from ray_fracbackend.cli.plan import plan_workers

__all__ = ["plan_workers"]

warnings.warn(
    "ray_fracbackend.placement is deprecated: import plan_workers from ray_fracbackend.cli.plan",
    DeprecationWarning,
    stacklevel=2,
)
