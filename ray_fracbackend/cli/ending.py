"""How a command ends before its work is done: Ctrl-C, SIGTERM, an output that nobody reads, a full disk. Standard library only.

Exit codes are those of a shell: 128 plus the signal's number, so 130 after Ctrl-C, 143 after SIGTERM, and 141 where the reader of
a pipe is gone. None of them means that a problem was found.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# Windows has the first two and the last, others the first three.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))
_CLOSED_PIPE = 141
# Until a signal is sent again whose exception was ignored: the code that ignores it is over then.
_AGAIN_S = 0.05


class _OutputError(BaseException):
    """Standard output takes no more text; the exit code, and what to say. Not an Exception: no failure of the command."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Stopped(BaseException):
    """A signal asked this process to end. Not an Exception, so that no loop over failures swallows it.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def emit(text: str) -> None:
    """Print a line or a document on standard output at once. In a command that `to_its_end` runs."""
    with _output():
        print(text, flush=True)


def say(who: str, text: str) -> None:
    """Print a line on standard error: what went wrong, or what is going on."""
    with suppress(OSError):
        print(f"{who}: {text}", file=sys.stderr, flush=True)


def to_its_end(who: str, command: Callable[[], int]) -> int:
    """Run a command, and end it quietly where it is stopped or its output cannot be written.

    Args:
        who: Program, for the line on standard error.
        command: Returns the exit code. Its own ``finally`` blocks run before this returns.

    Returns:
        The command's exit code, or that of what stopped it.
    """
    _open_missing_streams()
    try:
        try:
            return command()
        finally:  # argparse leaves by SystemExit after --help
            _flush()
    except _OutputError as error:
        if error.text:
            say(who, error.text)
        return error.code
    except Stopped as stopped:
        say(who, ended_by(stopped.number))
        # Without the clean-up of libraries that were stopped anywhere, which may crash; the command's own is done.
        os._exit(128 + stopped.number)
    except KeyboardInterrupt:
        say(who, ended_by(signal.SIGINT))
        return 128 + signal.SIGINT


def ended_by(number: int) -> str:
    """Return what ended a command, for a line about it."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


@contextmanager
def stopping() -> Iterator[None]:
    """Raise `Stopped` in the main thread at the first signal that asks for an end; a second one ends the process at once.

    Whatever the block makes of the exception: an import that is interrupted may end in an error of its own.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in caught:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    def again(unraisable: Any) -> None:
        # It was raised where Python ignores exceptions, such as in a callback of the garbage collector.
        if not issubclass(unraisable.exc_type, Stopped):
            before(unraisable)
            return
        for each in caught:
            signal.signal(each, stop)
        timer = threading.Timer(_AGAIN_S, _send, (received.pop(),))
        timer.daemon = True
        timer.start()

    before, sys.unraisablehook = sys.unraisablehook, again
    # One that is ignored stays so: nohup, and jobs in the background of a shell script.
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
        sys.unraisablehook = before
        for number, handler in caught.items():
            signal.signal(number, handler)
    if received:
        raise Stopped(received[0])


def _send(number: int) -> None:
    """Send a signal to the main thread, out of another one."""
    if sys.platform == "win32":
        _thread.interrupt_main(signal.Signals(number))
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def _handlers() -> dict[int, Any]:
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    return {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}


def _open_missing_streams() -> None:
    """Stand in for streams that were closed at the start, so that no file or socket gets their numbers and then our text."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            try:
                os.fstat(number)
            except OSError:
                os.dup2(opened, number)
                os.close(opened)
                opened = number
        setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8"))


def _flush() -> None:
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
            raise _OutputError(_CLOSED_PIPE) from None
        raise _OutputError(1, f"cannot write to standard output: {error.strerror or error}") from None


def _drop_output() -> None:
    """Send what is left in the buffer nowhere, as the interpreter would try again at its end and complain."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
