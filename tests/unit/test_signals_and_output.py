"""How commands end: signals, closed outputs, closed streams. Real processes with only the standard library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import NAPS, with_signals

pytestmark = pytest.mark.linux(reason="signals and closed descriptors are those of Unix")

ROOT = Path(__file__).parents[2]
# A command that does something before and after its work, like the real ones.
COMMAND = """
import sys, time
from ray_fracbackend.cli.output import emit
from ray_fracbackend.cli.signals import stopping, to_its_end

def work():
    with stopping():
        try:
            print("begun", file=sys.stderr, flush=True)
            {body}
        finally:
            print("cleaned up", file=sys.stderr, flush=True)
    return 0

sys.exit(to_its_end("program", work))
"""
# Simulates a library that is interrupted while it imports another.
SWALLOW = f"""
            try:
                {NAPS}
            except BaseException:
                raise ImportError("half an import") from None
"""
IGNORE = f"""
            try:
                {NAPS}
            except BaseException:
                pass
"""


def start(body: str, ignored: bool = False) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        with_signals(sys.executable, "-c", COMMAND.format(body=body), ignored=ignored),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    return process


def in_shell(body: str, redirection: str) -> tuple[int, str]:
    """Return exit code and standard error of the command in a shell, with a redirection or a pipe after it."""
    line = f'"$0" -c "$1" {redirection}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, COMMAND.format(body=body)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("body", [NAPS, SWALLOW, IGNORE], ids=["sleeps", "fails instead", "goes on"])
@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM"), (1, "ended by SIGHUP")],
)
def test_signals(number: int, said: str, body: str) -> None:
    """One line, the shell's exit code, and the command's clean-up, whatever the interrupted code does with the exception."""
    process = start(body)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (128 + number, f"cleaned up\nprogram: {said}\n")


def test_a_second_signal_ends_a_clean_up_that_hangs() -> None:
    """A second signal ends the process at once."""
    inside = "print('inside', file=sys.stderr, flush=True)"
    process = start(f"try:\n                {inside}; {NAPS}\n            finally:\n                {NAPS}")
    assert process.stderr is not None
    assert process.stderr.readline() == "inside\n"
    process.send_signal(signal.SIGINT)
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (-signal.SIGTERM, "")


def test_an_ignored_signal_stays_ignored() -> None:
    """nohup and a shell's background jobs rely on this."""
    process = start("time.sleep(2); emit('done')", ignored=True)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (0, "done\n", "cleaned up\n")


def test_a_closed_pipe() -> None:
    """Exit code 141 without output, as for a program that SIGPIPE ends."""
    code, errors = in_shell("time.sleep(0.5); emit('x' * 10)", "| true")
    assert (code, errors) == (141, "begun\ncleaned up\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk() -> None:
    """Exit code 1 with the reason."""
    code, errors = in_shell("emit('text')", ">/dev/full")
    assert (code, errors) == (
        1,
        "begun\ncleaned up\nprogram: cannot write to standard output: No space left on device\n",
    )


def test_a_closed_output() -> None:
    """The command's own exit code is returned."""
    assert in_shell("emit('text')", ">&-") == (0, "begun\ncleaned up\n")


def test_a_closed_standard_error() -> None:
    """Nothing can be printed, and the exit code stays the same."""
    assert in_shell("emit('text')", "2>&- >/dev/null") == (0, "")


def test_help_into_a_closed_pipe() -> None:
    """argparse prints the help and exits; the interpreter reports no error afterwards."""
    line = '"$0" -m ray_fracbackend --help | true; exit ${PIPESTATUS[0]}'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode in (0, 141)  # the output may have been read before the pipe was closed
    assert done.stderr == ""
