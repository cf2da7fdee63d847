"""Command ``run``: run an unedited script whose TorchTrainers start with FracTorchConfig. Runs on the driver.

The configuration is replaced when a trainer is made, not the name TorchConfig: a script may have imported that from
anywhere, or pass none at all.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import _ray
from ray_fracbackend.config import FracTorchConfig, frac_config


def run_script(script: str, arguments: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, in this process, with FracTorchConfig in its TorchTrainers.

    Args:
        script: Path of the script; it becomes ``__main__``. Its folder must be in ``sys.path`` already: importing Ray puts a
            folder of its own before it, as it does in the script.
        arguments: Its command line.
        settings: Settings of FracTorchConfig; they override those of the script's TorchConfig.

    Raises:
        ValueError: A setting breaks its rule.
        BaseException: Any error of the script, SystemExit included.
    """
    replace_torch_config(settings)
    if _ray.v2_enabled():
        # Trainers that the script makes in other processes, such as in a Tune function.
        from ray_fracbackend.integrations.callback import use_everywhere

        use_everywhere(settings)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def replace_torch_config(settings: Mapping[str, Any]) -> None:
    """Make every TorchTrainer that this process creates from now on start with FracTorchConfig.

    Args:
        settings: As for :func:`ray_fracbackend.config.frac_config`.

    Raises:
        ValueError: A setting breaks its rule.
    """
    FracTorchConfig(**settings)  # a wrong setting raises now, not when the script makes its trainer
    TorchTrainer.__init__ = _with_frac_config(TorchTrainer.__init__, settings)


def _with_frac_config(init: Callable[..., None], settings: Mapping[str, Any]) -> Callable[..., None]:
    # functools.wraps keeps the signature, in which the V1 engine looks up the names of arguments.
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, torch_config: TorchConfig | None = None, **kwargs: Any) -> None:
        config = frac_config(torch_config, settings)
        init(self, *args, torch_config=config, **kwargs)
        _ray.keep_torch_config(self, config)

    return __init__
