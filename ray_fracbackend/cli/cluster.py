"""Connection of a command to a Ray cluster. Runs on the driver; imports Ray when it connects."""

from __future__ import annotations

import atexit
import logging
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ray_fracbackend.cli.address import Target, target_of
from ray_fracbackend.cli.options import declared_text, options_text
from ray_fracbackend.cli.output import say
from ray_fracbackend.cli.program import PROGRAM, CommandError
from ray_fracbackend.timeouts import bounded


@contextmanager
def connected(
    address: str | None, timeout_s: float = 30.0, declared: Mapping[str, int] | None = None
) -> Iterator[bool]:
    """Connect to a cluster, or start a local Ray, in the main thread; disconnect at the end.

    Args:
        address: As for `target_of`.
        timeout_s: Time limit of the connection in seconds; the start of a local Ray has none.
        declared: ``num_gpus`` and ``num_cpus`` for a Ray that is started; no effect on a running one.

    Yields:
        True if Ray was started for the block, False if it was running.

    Raises:
        CommandError: There is no connection; ``reason`` says why.
    """
    target, declared = target_of(address), dict(declared or {})
    if target.is_local and target.automatic:
        say(
            PROGRAM,
            "no running Ray cluster found: starting a local one for this command, up to a minute (--address names a cluster)",
        )
    import ray

    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _init(target, timeout_s, declared if target.is_local else {})
    except BaseException as error:
        if target.is_local:
            ray.shutdown()
        if isinstance(error, SystemExit):  # Ray's own handlers exit with other codes
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:  # Ray sets two handlers, and the one in C++ aborts
        signal.signal(signal.SIGTERM, sigterm)
    if declared:
        text = f"{options_text(declared)}: no effect, because {target.text} is already running"
        say(PROGRAM, declared_text(declared) if target.is_local else text)
    try:
        yield target.is_local
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, sigterm)


def _init(target: Target, timeout_s: float, declared: Mapping[str, int]) -> None:
    import ray

    from ray_fracbackend import _ray

    def init() -> None:
        host, _, port = target.address.rpartition("/")[2].rpartition(":")
        if port.isdecimal():  # where nothing listens Ray would try again for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        logging.getLogger("ray").setLevel(logging.ERROR)
        if target.automatic:
            with suppress(ImportError):  # an older Ray sends it only if RAY_AUTH_MODE=token
                _ray.send_token()
        ray.init(target.address, log_to_driver=False, logging_level="ERROR", **declared)

    try:
        if target.is_local:
            init()  # in this thread: on Linux the processes of a local Ray end with the thread that started them
        else:
            bounded(init, timeout_s)
    except TimeoutError:
        atexit.unregister(ray.shutdown)  # it could wait for the thread that still connects
        fix = "check the address, the head node, its firewall and the cluster's token, or raise --timeout-s"
        raise CommandError("no_answer", f"{target.text}: no connection within {timeout_s:g} s; {fix}") from None
    except Exception as error:  # Ray raises errors of many classes
        fix = "start one with `ray start --head`, or correct the address"
        if target.automatic:
            fix = "name a cluster with --address; if this one has ended, delete that file or run `ray stop`"
        raise CommandError("no_cluster", f"no connection to Ray at {target.text}: {error}; {fix}") from error
