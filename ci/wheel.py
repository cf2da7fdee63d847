"""Builds the wheel, installs it into a new virtual environment, and tries import and command line there.

usage: python3 ci/wheel.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from common import install, make_venv, run

SMOKE = """
import ray_fracbackend
from ray_fracbackend import FracTorchConfig, verify_process_group
assert "site-packages" in ray_fracbackend.__file__, ray_fracbackend.__file__
assert FracTorchConfig().backend == "auto"
"""


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="ray-fracbackend-wheel-"))
    try:
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder)
        (wheel,) = folder.glob("*.whl")
        python = make_venv(folder / "venv")
        install(python, str(wheel))
        # -I: neither the current folder nor PYTHONPATH, so that it is the wheel which is tried.
        run(python, "-I", "-c", SMOKE)
        run(python, "-I", "-m", "ray_fracbackend", "--version")
        run(python.with_name("ray-fracbackend" + python.suffix), "--help")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
