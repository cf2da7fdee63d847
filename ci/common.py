"""Functions shared by the scripts of this folder. Standard library only; Linux, macOS and Windows."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
# Exit code of a script that cannot run on this machine, after it has printed the reason; pytest does not use it.
NOT_RUN = 77


def call(*command: str | Path, output: IO[str] | None = None, **env: str) -> int:
    """Run a command in the project's folder, with its output in a file or on screen; return its exit code."""
    words = list(map(str, command))
    print("+", *(f"{name}={value}" for name, value in env.items()), *words, file=output, flush=True)
    variables = {**os.environ, **env}
    return subprocess.run(words, cwd=ROOT, env=variables, stdout=output, stderr=output, check=False).returncode


def run(*command: str | Path, **env: str) -> None:
    """Run a command in the project's folder, show it, and exit with its exit code if it fails."""
    if code := call(*command, **env):
        sys.exit(code)


def make_venv(folder: Path) -> Path:
    """Create a virtual environment if there is none; return its Python."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    return python


def install(python: Path, *what: str) -> None:
    """Install packages with the project's constraints."""
    run(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, *what)
