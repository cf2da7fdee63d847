"""Run each command of the command line once, as a user does, on this machine.

usage: python ci/commands.py [COMMAND ...]     in an environment with the project and its extra `demo`

A command must end in time, with exit code 0, and must print its lines. If one fails, the next still runs. The script
prints a table and exits with 1 if a command failed. Standard library only; Linux, macOS and Windows.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common import ROOT


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        arguments: Arguments after the command's name.
        limit_s: Time limit in seconds, at least 1.5 times the time on the slowest machine: Windows' builds under Wine
            on two cores (ci/wine_results.jsonl: doctor 39 s, demo 262 s, the example of `run` 184 s with three epochs).
        prints: Regular expressions; each must match a line of the output.
    """

    arguments: tuple[str, ...]
    limit_s: float
    prints: tuple[str, ...]


_LAPTOP = str(ROOT / "examples" / "windows_laptop.py")
COMMANDS = {
    "doctor": Command((), 120, (r"^  ok +Gloo ", r"^Paste this into an issue:")),
    "plan": Command(("--num-workers", "2"), 255, (r"\[2 workers, .*, not verified\]$",)),
    "test": Command(("--num-workers", "2"), 260, (r"verified in \d+ ms", r"^10 DDP steps on 2 workers: ")),
    # The script uses Ray's own TorchConfig, and every rank saves a checkpoint with the same name. On Windows this fails
    # without `run`.
    "run": Command(
        ("--on-missing-cuda", "cpu", _LAPTOP, "--stock", "--epochs", "1"),
        300,
        (r"TorchTrainer starts with FracTorchConfig\(", r"^loaded the checkpoint of epoch 0: "),
    ),
    "demo": Command((), 420, (r"^checkpoint of rank 0 loaded back: accuracy (0\.9|1)",)),
}


def run_command(name: str, program: Sequence[str], cwd: Path) -> str:
    """Run one command and show its output; return ``passed`` or the reason of the failure."""
    command = COMMANDS[name]
    words = [*program, name, *command.arguments]
    print("+", *words, flush=True)
    # A file, because a process that is left would hold a pipe open.
    with tempfile.TemporaryFile() as output:
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                words, cwd=cwd, stdout=output, stderr=output, timeout=command.limit_s, check=False
            ).returncode
        output.seek(0)
        shown = output.read().decode(errors="replace").replace("\r\n", "\n")
    sys.stdout.buffer.write(f"{shown}\n".encode(sys.stdout.encoding, "backslashreplace"))
    sys.stdout.flush()
    if code is None:
        return f"failed: no end within {command.limit_s:g} s"
    if code:
        return f"failed: exit code {code}"
    missing = [text for text in command.prints if not re.search(text, shown, flags=re.MULTILINE)]
    return f"failed: no line with {' or '.join(missing)}" if missing else "passed"


def run_commands(names: Iterable[str], program: Sequence[str], cwd: Path = ROOT) -> bool:
    """Run commands one after the other and print a table; return whether all passed."""
    results = {}
    for name in names:
        started = time.monotonic()
        results[name] = f"{run_command(name, program, cwd)}, {time.monotonic() - started:.0f} s"
    print("\n".join(f"{name}: {result}" for name, result in results.items()), flush=True)
    return all(result.startswith("passed") for result in results.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; default: all")
    if not run_commands(parser.parse_args().commands or COMMANDS, (sys.executable, "-m", "ray_fracbackend")):
        sys.exit("a command failed, see above")


if __name__ == "__main__":
    main()
