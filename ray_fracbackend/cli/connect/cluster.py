"""Connection of a command to a Ray cluster. Runs on the driver; imports Ray when it connects."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ray_fracbackend.cli.connect.address import ClusterError, Target, check_listening, target_of
from ray_fracbackend.cli.connect.attempt import attempt, cluster_error
from ray_fracbackend.cli.options import declared_text, options_text
from ray_fracbackend.cli.output import say
from ray_fracbackend.cli.program import PROGRAM
from ray_fracbackend.timeouts import Deadline


@contextmanager
def connected(
    address: str | None, timeout_s: float = 30.0, declared: Mapping[str, int] | None = None
) -> Iterator[bool]:
    """Connect to a cluster, or start Ray on this machine as ``ray.init()`` does, and disconnect at the end.

    The start of a local Ray is announced on standard error, and ``timeout_s`` does not limit it.

    Args:
        address: As for ``ray.init``; None for the running cluster that ``ray.init()`` would find, else a local one.
        timeout_s: Time limit of the first connection in seconds.
        declared: ``num_gpus`` and ``num_cpus`` for a Ray that is started; no effect on a running one. Both cases are announced too.

    Yields:
        True if Ray was started for the block, False if it was running.

    Raises:
        ClusterError: There is no connection; ``reason`` says why.
    """
    target, deadline = target_of(address), Deadline(timeout_s)
    if not target.is_local:
        check_listening(target, deadline.left_s)
        attempt(target, deadline)
    elif address is None and not os.environ.get("RAY_ADDRESS"):
        say(PROGRAM, "no running Ray cluster found: starting a local one for this command (--address names a cluster)")
    declared = dict(declared or {})
    if declared:
        text = f"{options_text(declared)}: no effect, because {target.text} is already running"
        say(PROGRAM, declared_text(declared) if target.is_local else text)
    import ray

    if ray.is_initialized():
        raise RuntimeError("this process already uses a Ray cluster: call ray.shutdown() first")
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _init(target, declared)
        try:
            yield target.is_local
        finally:
            ray.shutdown()
    finally:
        _set_sigterm(sigterm)


def check_address(address: str | None, timeout_s: float = 30.0) -> None:
    """Check that a server listens at an address, without connecting to it and without importing Ray.

    Args:
        address: As in `connected`.
        timeout_s: Time limit in seconds.

    Raises:
        ClusterError: It is not an address, or no server listens there.
    """
    check_listening(target_of(address), timeout_s)


def _init(target: Target, declared: Mapping[str, int]) -> None:
    """Run ``ray.init`` without its output, in this thread: on Linux a local Ray's processes end with the thread that started them.

    Raises:
        ClusterError: It failed.
    """
    import ray

    with own_sigterm(), _captured_stderr() as captured:
        try:
            ray.init(
                address=target.address,
                log_to_driver=False,
                logging_level="ERROR",
                **(declared if target.is_local else {}),
            )
        except Exception as error:  # Ray has no error class for a local Ray that does not start in time
            ray.shutdown()
            raise _error(target, str(error) or type(error).__name__, captured()) from error
        except BaseException:
            ray.shutdown()
            raise


def _error(target: Target, said: str, captured: str) -> ClusterError:
    if not target.is_local:
        return cluster_error(target, f"{said}\n{captured}")
    first = said.strip().splitlines()[0].rstrip(".")
    fix = "try again when this machine is less busy, or name a running cluster"
    return ClusterError(f"Ray did not start on this machine: {first}; {fix}", "no_answer")


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep the process's handler of SIGTERM. Ray sets two handlers, and the one in C++ aborts.

    If the process has none, Ray's Python handler stays: without it the signal kills the process, and agents of a local Ray remain.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        # Ray's handler exits with the signal's number.
        if error.code == signal.SIGTERM and callable(before):
            before(signal.SIGTERM, None)
        raise
    finally:
        _set_sigterm(signal.getsignal(signal.SIGTERM) if before is signal.SIG_DFL else before)


def _set_sigterm(handler: Any) -> None:
    # C code may have set a handler that Python does not know.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """Redirect file descriptor 2, to which C++ writes, to a file during the block.

    Yields:
        A function that returns the text written so far.
    """
    try:
        saved = os.dup(2)
    except OSError:  # closed
        yield lambda: ""
        return
    with tempfile.TemporaryFile() as file:

        def text() -> str:
            with suppress(OSError, ValueError):
                file.seek(0)
                return file.read().decode(errors="replace")
            return ""

        try:
            os.dup2(file.fileno(), 2)
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)
