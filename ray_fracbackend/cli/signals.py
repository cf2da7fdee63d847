"""End a command before its work is done: Ctrl-C, SIGTERM, SIGHUP. Standard library only.

Exit codes are those of a shell: 128 plus the signal's number, so 130 after Ctrl-C and 143 after SIGTERM. None of them means that a
problem was found.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ray_fracbackend.cli.output import OutputError, flush, say

# Windows has the first two and the last, other systems the first three.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))


class Stopped(BaseException):
    """A signal asked this process to end. Not an Exception, so code that handles failures does not catch it.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def to_its_end(who: str, command: Callable[[], int]) -> int:
    """Run a command, and end it without a traceback if it is stopped or its output cannot be written.

    Args:
        who: Name of the program, for the line on standard error.
        command: Returns the exit code. Its own ``finally`` blocks run before this returns.

    Returns:
        The exit code of the command, or of the signal or error that stopped it.
    """
    try:
        try:
            return command()
        finally:  # argparse leaves by SystemExit after --help
            flush()
    except OutputError as error:
        if error.text:
            say(who, error.text)
        return error.code
    except Stopped as stopped:
        say(who, ended_by(stopped.number))
        # Skip the clean-up of libraries, which were stopped at any point and may crash; that of the command is done.
        os._exit(128 + stopped.number)
    except KeyboardInterrupt:
        say(who, ended_by(signal.SIGINT))
        return 128 + signal.SIGINT


def ended_by(number: int) -> str:
    """Return how a command ended, for a line about it."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


@contextmanager
def stopping() -> Iterator[None]:
    """Raise `Stopped` in the main thread at the first signal; a second signal ends the process at once.

    This holds even if the block raises another exception: an interrupted import may raise an error of its own.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in caught:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    # Ignored signals stay ignored: nohup, and background jobs of a shell script.
    caught = {} if threading.current_thread() is not threading.main_thread() else _handlers()
    for number in caught:
        signal.signal(number, stop)
    try:
        yield
    except BaseException:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
    if received:
        raise Stopped(received[0])


def _handlers() -> dict[int, Any]:
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    return {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
