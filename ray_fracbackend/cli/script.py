"""Run a script in this process as python would, for `run` and `demo`. Runs on the driver.

The configuration is replaced when a trainer is created. Replacing the name TorchConfig would not be enough: a script may
have imported it already, or may pass no configuration.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import _ray
from ray_fracbackend.cli.output import say
from ray_fracbackend.cli.placement import bundles_of, cluster_too_small, request_text
from ray_fracbackend.cli.program import PROGRAM
from ray_fracbackend.errors import InsufficientResourcesError
from ray_fracbackend.integrations.trainers import replace_torch_config

_WHO = f"{PROGRAM} run"


def run_script(
    script: str,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    *,
    is_module: bool = False,
    resources: Mapping[str, int] | None = None,
) -> int:
    """Run a script as `run_as_main` does, with FracTorchConfig in its TorchTrainers.

    Args:
        script: As for `run_as_main`.
        arguments: Its command line.
        settings: Settings of FracTorchConfig; they override those of the script's TorchConfig.
        is_module: As ``python -m``.
        resources: Default arguments of ``ray.init``: ``num_gpus`` and ``num_cpus``.

    Returns:
        The exit code.

    Raises:
        SystemExit: The script raised it.
    """
    if _ray.v2_enabled():
        # For trainers that the script creates in other processes, such as in a Tune function.
        from ray_fracbackend.integrations.callback import use_everywhere

        use_everywhere(settings)
    replace_torch_config(settings, functools.partial(_announce, settings))
    TorchTrainer.fit = _after_check(TorchTrainer.fit)
    ray.init = functools.partial(ray.init, **(resources or {}))
    return run_as_main(script, arguments, is_module=is_module)


def run_as_main(script: str, arguments: Sequence[str], *, is_module: bool = False) -> int:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, in this process.

    Args:
        script: Path of the script, or name of the module; it becomes ``__main__``.
        arguments: Its command line.
        is_module: As ``python -m``.

    Returns:
        The exit code: 1 after an error of the script, whose traceback is printed without frames of this command.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the script.
        SystemExit: The script raised it.
    """
    sys.argv = [script, *arguments]
    _ray.leave_sigint_to_python(TorchTrainer)
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(script), run_name="__main__")  # as python sets __file__
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0


def _announce(settings: Mapping[str, Any], config: TorchConfig, is_own: bool) -> None:
    """Print the configuration of a trainer; ``is_own``: it is the script's."""
    note = "; the settings of the command line have no effect on it" if is_own and settings else ""
    say(_WHO, f"TorchTrainer starts with {config!r}{note}")


def _after_check(fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def checked_fit(trainer: TorchTrainer) -> Any:
        _check_place(trainer)
        return fit(trainer)

    return checked_fit


def _check_place(trainer: TorchTrainer) -> None:
    """Check that a Ray that this process started can place a trainer's workers; start Ray as the trainer would.

    Ray itself waits without a limit, because nodes may join a cluster.

    Raises:
        InsufficientResourcesError: The workers do not fit.
    """
    num_workers, strategy = trainer.scaling_config.num_workers, trainer.scaling_config.placement_strategy
    # The number may be a range or a search space. V2 trains 0 workers in this process.
    if not isinstance(num_workers, int) or num_workers < 1:
        return
    if not ray.is_initialized():
        ray.init()
    bundles = bundles_of(trainer.scaling_config)
    if bundles and _ray.started_here() and (reason := cluster_too_small(bundles, strategy, is_own=True)):
        raise InsufficientResourcesError(f"Ray cannot place {request_text(bundles, strategy)}: {reason}.")
