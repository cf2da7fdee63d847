"""Run each command of the command line once, as a user does, on this machine.

usage: python ci/commands.py [COMMAND ...]     in an environment with the project and its extra `demo`

A command must end in time, with its exit code, and must print its lines. If one fails, the next still runs. The script
prints a table and exits with 1 if a command failed. Standard library only; Linux, macOS and Windows.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common import ROOT

# Seconds for a command to shut down its Ray after SIGTERM, which it gets after its time limit.
_GRACE_S = 20


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        arguments: Arguments after ray-fracbackend.
        limit_s: Time limit in seconds, at least 1.5 times the time on the slowest machine: Windows' builds under Wine
            on two cores (ci/wine_results.jsonl: doctor 39 s, demo 262 s, one start of the smoke test 167 s, the example
            of `run` 184 s with three epochs).
        prints: Regular expressions; each must match a line of the output.
        exit_code: Expected exit code.
    """

    arguments: tuple[str, ...]
    limit_s: float
    prints: tuple[str, ...]
    exit_code: int = 0

    @property
    def name(self) -> str:
        """Return the name of the command."""
        return self.arguments[0]


_LAPTOP = str(ROOT / "examples" / "windows_laptop.py")
COMMANDS = (
    Command(("doctor",), 120, (r"^  ok +Gloo ", r"^Paste this into an issue:")),
    Command(("plan", "--num-workers", "2"), 255, (r"\[2 workers, .*, not verified\]$",)),
    Command(("test", "--num-workers", "2"), 260, (r"verified in \d+ ms", r"^10 DDP steps on 2 workers: ")),
    # The script uses Ray's own TorchConfig, and every rank saves a checkpoint with the same name. On Windows this fails
    # without `run`.
    Command(
        ("run", "--on-missing-cuda", "cpu", _LAPTOP, "--stock", "--epochs", "1"),
        300,
        (r"TorchTrainer starts with FracTorchConfig\(", r"^loaded the checkpoint of epoch 0: "),
    ),
    Command(("demo",), 420, (r"^checkpoint of rank 0 loaded back: accuracy (0\.9|1)",)),
)


def run_command(command: Command, program: Sequence[str], cwd: Path = ROOT) -> str:
    """Run one command and show its output; return ``passed`` or the reason of the failure."""
    words = [*program, *command.arguments]
    print("+", *words, flush=True)
    # A file, because a process that is left would hold a pipe open.
    with tempfile.TemporaryFile() as output:
        code = _exit_code(words, command.limit_s, output, cwd)
        output.seek(0)
        shown = output.read().decode(errors="replace").replace("\r\n", "\n")
    print(shown, flush=True)
    if code is None:
        return f"failed: no end within {command.limit_s:g} s"
    if code != command.exit_code:
        return f"failed: exit code {code}, not {command.exit_code}"
    missing = [text for text in command.prints if not re.search(text, shown, flags=re.MULTILINE)]
    return f"failed: no line with {' or '.join(missing)}" if missing else "passed"


def _exit_code(words: list[str], limit_s: float, output: IO[bytes], cwd: Path) -> int | None:
    """Return the exit code; None after the time limit, when the command and its child processes have been ended."""
    process = subprocess.Popen(words, cwd=cwd, stdout=output, stderr=output, start_new_session=os.name != "nt")
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with its child processes; on Windows at once, because it has no SIGTERM."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], check=False)
        process.wait()
        return
    import signal

    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        break


def run_commands(commands: Sequence[Command], program: Sequence[str], cwd: Path = ROOT) -> bool:
    """Run commands one after the other and print a table; return whether all passed."""
    rows = []
    for command in commands:
        started = time.monotonic()
        result = run_command(command, program, cwd)
        rows.append((command.name, result, f"{time.monotonic() - started:.0f} s"))
    print("\n".join(f"{name}: {result}, {seconds}" for name, result, seconds in rows), flush=True)
    return all(result == "passed" for _, result, _ in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [command.name for command in COMMANDS]
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(names)}; default: all")
    chosen = parser.parse_args().commands
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"no command {', '.join(unknown)}; there are {', '.join(names)}")
    commands = [command for command in COMMANDS if not chosen or command.name in chosen]
    if not run_commands(commands, (sys.executable, "-m", "ray_fracbackend")):
        sys.exit("a command failed, see above")


if __name__ == "__main__":
    main()
