"""Check on any system that the declared dependencies can be installed on Windows from wheels only.

    python ci/resolve_windows.py [PYTHON_VERSION ...]      default: every supported version; needs `pip install uv`

pip evaluates environment markers for its own system, so it cannot check this on Linux; uv can.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def resolve(python_version: str) -> str:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-platform", "x86_64-pc-windows-msvc", "--python-version", python_version]
    command += ["--only-binary", ":all:", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise SystemExit(f"Python {python_version} on win_amd64: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python_versions", nargs="*", default=PYTHON_VERSIONS)
    for version in parser.parse_args().python_versions:
        found = resolve(version).split()
        shown = [line for line in found if line.startswith(("ray==", "torch==", "psutil==", "nvidia-ml-py=="))]
        print(f"Python {version} on win_amd64: {len(found)} wheels, {' '.join(shown)}")


if __name__ == "__main__":
    main()
