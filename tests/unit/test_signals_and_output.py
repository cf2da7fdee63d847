"""How commands end: signals, closed outputs, closed streams. Real processes with only the standard library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import NAPS, with_signals

pytestmark = pytest.mark.linux(reason="signals and closed descriptors are those of Unix")

ROOT = Path(__file__).parents[2]
# A command that does something before and after its work, like the real ones.
COMMAND = """
import sys, time
from ray_fracbackend.cli.output import emit
from ray_fracbackend.cli.signals import to_its_end

def work():
    try:
        print("begun", file=sys.stderr, flush=True)
        {body}
    finally:
        print("cleaned up", file=sys.stderr, flush=True)
        {after}
    return 0

sys.exit(to_its_end("program", work))
"""


def start(after: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        with_signals(sys.executable, "-c", COMMAND.format(body=NAPS, after=after)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    return process


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "program: interrupted\n"), (signal.SIGTERM, "")], ids=["Ctrl-C", "SIGTERM"]
)
def test_signals(number: int, said: str) -> None:
    """The shell's exit code, after the command's clean-up and without a traceback."""
    process = start()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (128 + number, f"cleaned up\n{said}")


def test_a_second_sigterm_ends_a_clean_up_that_hangs() -> None:
    """It ends the process at once."""
    process = start(after=NAPS)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline() == "cleaned up\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (-signal.SIGTERM, "")


_FULL = "cannot write to standard output: No space left on device"
# The command's work, a redirection or a pipe after it in a shell, its exit code and its standard error.
_OUTPUTS = {
    "a closed pipe": ("time.sleep(0.5); emit('x' * 10)", "| true", 141, "begun\ncleaned up\n"),
    "a closed output": ("emit('text')", ">&-", 0, "begun\ncleaned up\n"),
    "a closed standard error": ("emit('text')", "2>&- >/dev/null", 0, ""),
    "a full disk": ("emit('text')", ">/dev/full", 1, f"begun\ncleaned up\nprogram: {_FULL}\n"),
}


def piped(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a shell, with a redirection or a pipe after it."""
    line = f'"$0" "$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    command = ["bash", "-c", line, sys.executable, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False)


@pytest.mark.parametrize(("body", "redirection", "code", "errors"), _OUTPUTS.values(), ids=_OUTPUTS)
def test_outputs(body: str, redirection: str, code: int, errors: str) -> None:
    """Exit code 141 as for a program that SIGPIPE ends, 1 with the reason if the disk is full, else the command's own."""
    if ">/dev/full" in redirection and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    done = piped(redirection, "-c", COMMAND.format(body=body, after=""))
    assert (done.returncode, done.stderr) == (code, errors)


def test_help_into_a_closed_pipe() -> None:
    """argparse prints the help and exits; the interpreter reports no error afterwards."""
    done = piped("| true", "-m", "ray_fracbackend", "--help")
    assert done.returncode in (0, 141)  # the output may have been read before the pipe was closed
    assert done.stderr == ""
