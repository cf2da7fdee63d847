"""What the scripts of this folder share. Standard library only; Linux, macOS and Windows."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "ci" / "constraints.txt"


def run(*command: str | Path, **env: str) -> None:
    """Runs a command in the project's folder, shows it, and ends the script with its exit code if it fails."""
    shown = " ".join([*(f"{name}={value}" for name, value in env.items()), *map(str, command)])
    print(f"+ {shown}", flush=True)
    code = subprocess.run(list(map(str, command)), cwd=ROOT, env={**os.environ, **env}, check=False).returncode
    if code:
        sys.exit(code)


def make_venv(folder: Path) -> Path:
    """A virtual environment, made where there is none yet; returns its Python."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    return python


def install(python: Path, *what: str) -> None:
    """Installs packages under the project's constraints."""
    run(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, *what)
