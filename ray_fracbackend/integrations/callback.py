"""Callback of Ray Train V2 that starts stock trainers with FracTorchConfig, set by environment variables. Controller side.

::

    RAY_TRAIN_CALLBACKS=ray_fracbackend.integrations.callback.FracTorchCallback
    RAY_FRACBACKEND_SETTINGS='{"on_missing_cuda": "cpu"}'

Set these environment variables; scripts need no change. V2 reads the first one in the process that calls ``fit()``, so
it can be set for a whole cluster. The second one is optional. With ``limit_gpu_memory`` an OutOfMemoryError does not
name the cap here, because V2 has already wrapped the train function with the script's own configuration.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from ray_fracbackend import _ray
from ray_fracbackend.decide.settings import Settings
from ray_fracbackend.log import logger

CALLBACKS_ENV = "RAY_TRAIN_CALLBACKS"
SETTINGS_ENV = "RAY_FRACBACKEND_SETTINGS"


class FracTorchCallback(_ray.worker_group_callback_class()):  # type: ignore[misc]
    """Replace a run's TorchConfig by FracTorchConfig before the backend starts.

    Raises:
        ValueError: ``RAY_FRACBACKEND_SETTINGS`` is not a JSON object, or a setting in it breaks its rule. Ray raises
            another ValueError from it that names only this class, so the message is logged too.
    """

    def __init__(self) -> None:
        try:
            self._settings = _settings()
        except ValueError as error:
            logger.error("%s", error)
            raise

    def after_worker_group_start(self, worker_group: _ray.WorkerGroup) -> None:
        """Replace the configuration. Ray runs this callback before its own, which starts the backend."""
        _ray.replace_backend_config(worker_group, partial(self._replaced, _ray.run_name(worker_group)))

    def _replaced(self, run: str, config: Any) -> Any:
        # No torch import here: the variable may be set for a cluster where some images have no torch.
        torch_trainers = sys.modules.get("ray.train.torch")
        if torch_trainers is None or not isinstance(config, torch_trainers.TorchConfig):
            return config
        from ray_fracbackend.integrations.trainers import frac_config

        # TorchTrainer has already written "nccl" if the script set no backend.
        left_open = {"backend": "auto"} if config.backend == "nccl" else {}
        replaced = frac_config(config, {**left_open, **self._settings})
        if replaced is not config:
            logger.info("run %s: %r replaces %r", run, replaced, config)
        return replaced


def use_everywhere(settings: Mapping[str, Any]) -> None:
    """Set the variables for this process and all processes that it starts, including a local Ray.

    Args:
        settings: Settings of FracTorchConfig.
    """
    path = f"{FracTorchCallback.__module__}.{FracTorchCallback.__name__}"
    others = [name for name in os.environ.get(CALLBACKS_ENV, "").split(",") if name and name != path]
    os.environ[CALLBACKS_ENV] = ",".join([*others, path])
    os.environ[SETTINGS_ENV] = json.dumps(dict(settings))


def _settings() -> dict[str, Any]:
    text = os.environ.get(SETTINGS_ENV, "{}")
    try:
        settings = json.loads(text)
        Settings(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{SETTINGS_ENV}={text!r}: must be a JSON object of FracTorchConfig's settings, such as "
            f'{{"on_missing_cuda": "cpu"}}: {error}'
        ) from None
    return dict(settings)
