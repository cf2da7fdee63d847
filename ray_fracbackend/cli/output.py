"""What a command writes: results on standard output, everything else on standard error. Standard library only.

If the output cannot be written the command ends; with exit code 141 if the reader closed the pipe, as for a program that SIGPIPE ends.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CLOSED_PIPE = 141


class OutputError(BaseException):
    """Standard output cannot be written; the exit code, and what to say. Not an Exception: no failure of the command."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text)
        self.code, self.text = code, text


def emit(text: str) -> None:
    """Print a line or a document on standard output at once. In a command that `to_its_end` runs."""
    with _output():
        print(text, flush=True)


def say(who: str, text: str) -> None:
    """Print a line on standard error: what went wrong, or what is going on."""
    if sys.stderr is None:  # closed at the start
        return
    with suppress(OSError):
        print(f"{who}: {text}", file=sys.stderr, flush=True)


@contextmanager
def log_lines(logger: logging.Logger) -> Iterator[None]:
    """Write a logger's lines from INFO on to standard error while the block runs, whatever the level of its parents.

    Args:
        logger: Its level, handlers and propagation are restored afterwards.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def flush() -> None:
    """Write what is left of standard output."""
    if sys.stdout is not None:
        with _output():
            sys.stdout.flush()


@contextmanager
def _output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _drop_output()
        # Windows has its own number for a pipe that nobody reads.
        if isinstance(error, BrokenPipeError) or (sys.platform == "win32" and error.errno == errno.EINVAL):
            raise OutputError(_CLOSED_PIPE) from None
        raise OutputError(1, f"cannot write to standard output: {error.strerror or error}") from None


def _drop_output() -> None:
    """Send what is left in the buffer nowhere, as the interpreter would try again at its end and complain."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
