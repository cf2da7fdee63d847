"""A user's callback that raises in one hook."""

from __future__ import annotations

import os
from typing import Any

from ray_fracbackend._ray import v2_enabled

if v2_enabled():
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

    BASES: tuple[type, ...] = (WorkerGroupCallback, ControllerCallback)
else:
    from ray.tune import Callback

    BASES = (Callback,)
# The hook of a callback that Ray creates by its name in RAY_TRAIN_CALLBACKS.
HOOK = "RAY_FRACBACKEND_TEST_HOOK"


class Raising(*BASES):  # type: ignore[misc]
    """As a callback whose own start has not run: an attribute is missing."""

    def __init__(self, hook: str | None = None) -> None:
        hook = hook or os.environ[HOOK]

        def fails(*args: Any, **kwargs: Any) -> None:
            raise AttributeError(f"{hook}: no run")

        setattr(self, hook, fails)
