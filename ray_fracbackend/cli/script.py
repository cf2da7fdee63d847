"""Run a script in this process as python would, for `run` and `demo`. Runs on the driver.

The configuration is replaced when a trainer is created. Replacing the name TorchConfig would not be enough: a script may
have imported it already, or may pass no configuration.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

import ray
from ray.train.torch import TorchConfig, TorchTrainer

from ray_fracbackend import _ray
from ray_fracbackend.cli.declared import UsedRay, declaring
from ray_fracbackend.cli.no_effect import no_effect, option_names, without_effect
from ray_fracbackend.cli.options import options_text
from ray_fracbackend.cli.output import say
from ray_fracbackend.cli.program import PROGRAM
from ray_fracbackend.cli.signals import ended_by
from ray_fracbackend.cli.waiting import Waits, watching
from ray_fracbackend.config import FracTorchConfig
from ray_fracbackend.integrations.trainers import replace_torch_config

_WHO = f"{PROGRAM} run"
# Time for V2's controller to abort a run in order. While it waits for resources, it does not answer.
_ABORT_S = 3.0


def run_script(
    script: str,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    *,
    is_module: bool = False,
    declared: Mapping[str, int] | None = None,
) -> int:
    """Run a script as `run_as_main` does, with FracTorchConfig in its TorchTrainers.

    Args:
        script: As for `run_as_main`.
        arguments: Its command line.
        settings: Settings of FracTorchConfig; they override those of the script's TorchConfig.
        is_module: As ``python -m``.
        declared: ``num_gpus`` and ``num_cpus`` of a Ray that the script starts.

    Returns:
        The exit code.

    Raises:
        ValueError: A setting breaks its rule.
        SystemExit: The script raised it.
    """
    announce, waits = _Announce(settings), Waits(functools.partial(say, _WHO))
    _ray.replace_sigint_handler(TorchTrainer, _end_at_ctrl_c)
    if _ray.v2_enabled():
        # For trainers that the script creates in other processes, such as in a Tune function.
        from ray_fracbackend.integrations.callback import use_everywhere

        use_everywhere(settings)
    with declaring(declared or {}, announce.say) as used, watching(waits):
        replace_torch_config(settings, announce, functools.partial(_around_fit, waits, used))
        try:
            code = run_as_main(_WHO, script, arguments, is_module=is_module)
        except SystemExit as ended:
            if not ended.code:
                announce.end(script, declared or {}, used)
            raise
    if code == 0:
        announce.end(script, declared or {}, used)
    return code


class _Announce:
    """Lines about the configuration of trainers, each once.

    Args:
        settings: Settings on the command line.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._said: set[str] = set()
        self._has_trainer = False

    def __call__(self, config: TorchConfig, trainer: TorchTrainer, is_own: bool) -> None:
        """Print the configuration of a trainer, and the settings without an effect on it; ``is_own``: it is the script's."""
        self._has_trainer = True
        text = repr(config) if isinstance(config, FracTorchConfig) else type(config).__name__
        self.say(f"TorchTrainer starts with {text}")
        if is_own and self._settings:
            fix = ": set them there" if isinstance(config, FracTorchConfig) else ""
            self.say(no_effect(self._settings, f"the script makes its own {type(config).__name__}{fix}"))
            return
        gpus = trainer.scaling_config.num_gpus_per_worker
        if isinstance(gpus, (int, float)):  # V1 allows search spaces
            for line in without_effect(self._settings, config.backend, gpus):
                self.say(line)

    def end(self, script: str, declared: Mapping[str, int], used: UsedRay) -> None:
        """Print what had no effect, after a script that succeeded."""
        if not self._has_trainer:
            what = (
                f"{option_names(self._settings)} had no effect" if self._settings else "no configuration was replaced"
            )
            self.say(f"{script} made no TorchTrainer in its own process: {what} there")
        if declared and used.is_own is None:
            self.say(f"{options_text(declared)}: no effect, because {script} started no Ray in its own process")

    def say(self, line: str) -> None:
        """Print a line if it was not printed yet."""
        if line not in self._said:
            self._said.add(line)
            say(_WHO, line)


@contextmanager
def _around_fit(waits: Waits, used: UsedRay, trainer: TorchTrainer) -> Iterator[None]:
    """Check that Ray can place the workers; restore the handler of SIGINT, because V2 leaves its own after the run."""
    waits.check(trainer, used)
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def _end_at_ctrl_c(controller: Any) -> None:
    """End the run of a V2 controller at Ctrl-C, in order if the controller answers; a second Ctrl-C ends this process at once."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        say(_WHO, "Ctrl-C: ending the run; Ctrl-C again kills it at once")
        with suppress(Exception):
            ray.wait([controller.abort.remote()], timeout=_ABORT_S)
            ray.kill(controller)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, end)


def run_as_main(
    who: str,
    script: str,
    arguments: Sequence[str],
    *,
    is_module: bool = False,
    after_error: Callable[[Exception], None] | None = None,
) -> int:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, in this process.

    Args:
        who: The command, for its lines on standard error.
        script: Path of the script, or name of the module; it becomes ``__main__``. The first entry of python's ``sys.path`` must be
            set already, because importing Ray adds its own folder before it, as in the script.
        arguments: Its command line.
        is_module: As ``python -m``.
        after_error: Called with an error of the script, once its traceback is printed.

    Returns:
        The exit code: 1 after an error of the script, whose traceback is printed without frames of this command, and 128 plus
        the signal's number after a signal that the script did not handle, with the current line of the script.

    Raises:
        SystemExit: The script raised it.
    """
    sys.argv = [script, *arguments]
    with _watching_signals() as stopped_by:
        try:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(script), run_name="__main__")  # as python sets __file__
        except BaseException as error:
            frames = _frames_of_script(error.__traceback__)
            if (number := stopped_by()) and _comes_from_signal(error):
                say(who, f"{ended_by(number)}{_place(frames)}")
                return 128 + number
            if not isinstance(error, Exception):  # the script's own exit code
                raise
            sys.excepthook(type(error), error.with_traceback(frames), frames)
            if after_error is not None:
                after_error(error)
            return 1
    return 0


def _comes_from_signal(error: BaseException) -> bool:
    """Return True for Ctrl-C and errors that Ray or this command raises for a signal; False for errors of a script that handled it."""
    if isinstance(error, KeyboardInterrupt):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    # Cython frames have paths of Ray's source tree.
    ours_or_rays = (__file__, os.path.dirname(ray.__file__) + os.sep, "python/ray/")
    return bool(frames) and frames[-1].filename.startswith(ours_or_rays)


def _place(frames: TracebackType | None) -> str:
    if frames is None:
        return ""
    first = traceback.extract_tb(frames)[0]
    return f" at {first.filename}:{first.lineno}"


@contextmanager
def _watching_signals() -> Iterator[Callable[[], int | None]]:
    """Watch for signals that end a script, in addition to the handlers of Python and Ray; handlers of the script stay unchanged.

    Yields:
        A function that returns the received signal; None if there was none, or if the script has its own handler for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    # Receives the number of each signal that Python handles: Ray Train V2 ends with code 0 at Ctrl-C, Ray with 1 at SIGTERM.
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    original_init = ray.init
    ray.init = _with_sigterm(original_init)
    numbers = bytearray()

    def stopped_by() -> int | None:
        with suppress(OSError):  # no signal
            numbers.extend(reader.recv(4096))
        handlers = {number: signal.getsignal(number) for number in numbers}
        # SIG_DFL for a signal that Python handled: `_exit` has set it.
        return next(
            (n for n, handler in handlers.items() if handler is signal.SIG_DFL or _is_not_the_scripts(handler)), None
        )

    try:
        yield stopped_by
    finally:
        ray.init = original_init
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()


def _is_not_the_scripts(handler: Any) -> bool:
    module = str(getattr(handler, "__module__", ""))
    return handler is signal.default_int_handler or module.startswith("ray.") or module == __name__


def _with_sigterm(init: Callable[..., Any]) -> Callable[..., Any]:
    """End the script in order at SIGTERM and SIGHUP: Ray's C++ code replaces the handler of ray.init by one that aborts."""

    @functools.wraps(init)
    def init_ray(*arguments: Any, **options: Any) -> Any:
        context = init(*arguments, **options)
        with suppress(ValueError):  # in another thread
            if _is_not_the_scripts(signal.getsignal(signal.SIGTERM)):
                signal.signal(signal.SIGTERM, _exit)
            # By default SIGHUP ends the process at once, and agents of a local Ray keep running.
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
                signal.signal(signal.SIGHUP, _exit)
        return context

    return init_ray


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process and does not interrupt Ray's shutdown
    sys.exit(128 + number)


def _frames_of_script(frames: TracebackType | None) -> TracebackType | None:
    """Remove the frames before those of the script; None if it has none, as after a syntax error."""
    ours = (os.path.dirname(os.path.abspath(__file__)) + os.sep, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    return frames
