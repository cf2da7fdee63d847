"""Output of a command: results on standard output, everything else on standard error. Standard library only.

If the output cannot be written the command ends; with exit code 141 if the reader closed the pipe, like a program that SIGPIPE ends.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray_fracbackend.shown import printable

_CLOSED_PIPE = 141


class OutputError(BaseException):
    """Standard output cannot be written; has the exit code and a message. Not an Exception: the command itself did not fail."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text)
        self.code, self.text = code, text


def emit(text: str) -> None:
    """Print a line or a document on standard output at once. Only in a command that `to_its_end` runs."""
    with _output():
        print(printable(text), flush=True)


def say(who: str, text: str) -> None:
    """Print a line on standard error: an error, or a message about the progress."""
    if sys.stderr is None:  # closed at the start
        return
    with suppress(OSError):
        print(printable(f"{who}: {text}"), file=sys.stderr, flush=True)


def flush() -> None:
    """Write the buffered rest of standard output."""
    if sys.stdout is not None:
        with _output():
            sys.stdout.flush()


@contextmanager
def _output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _drop_output()
        # On Windows a write to a closed pipe has another error number.
        if isinstance(error, BrokenPipeError) or (sys.platform == "win32" and error.errno == errno.EINVAL):
            raise OutputError(_CLOSED_PIPE) from None
        raise OutputError(1, f"cannot write to standard output: {error.strerror or error}") from None


def _drop_output() -> None:
    """Discard the rest of the buffer, because the interpreter would write it again at exit and print an error."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
