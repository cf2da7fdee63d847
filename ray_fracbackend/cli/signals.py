"""How a command ends: the exit codes of a shell, 130 after Ctrl-C and 143 after SIGTERM. Standard library only."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

from ray_fracbackend.cli.output import OutputError, flush, say


def to_its_end(who: str, command: Callable[[], int]) -> int:
    """Run a command, and end it without a traceback if a signal ends it or its output cannot be written.

    Args:
        who: Name of the program, for the line on standard error.
        command: Returns the exit code. Its own ``finally`` blocks run before this returns.

    Returns:
        The exit code of the command, or 128 plus the number of the signal that ended it.

    Raises:
        SystemExit: SIGTERM ended the command, or the command raised it.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        received.append(number)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        try:
            return command()
        finally:  # argparse leaves by SystemExit after --help
            flush()
    except SystemExit:
        if received:  # ray.get() replaces the exit code
            raise SystemExit(128 + received[0]) from None
        raise
    except OutputError as error:
        if error.text:
            say(who, error.text)
        return error.code
    except KeyboardInterrupt:
        say(who, "interrupted")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
