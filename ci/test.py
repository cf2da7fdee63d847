"""Installs the project into a virtual environment of its own and runs every test that can run on this machine.

usage: python3 ci/test.py [--quick] [PYTEST ARGUMENT ...]

--quick leaves out what takes minutes. Tests that need a GPU or root skip themselves and say so. The trainer tests run
twice, once with each engine of Ray Train, and a few of them once more with the lowest Ray that is supported. Those of the
pieces for Ray, in upstream/, come last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common import ROOT, install, make_venv, run
from matrix import RAYS, SMOKE

ENGINE_TESTS = (
    *(f"tests/ray/test_{name}.py" for name in ("trainer", "demo", "run", "jobs", "tune")),
    "tests/faults/test_faults.py",
)
# c10d's stores ask for the name of every peer: a slow name server must not stop a test for longer than this.
RESOLVER = "timeout:1"
# Ray has wheels for Python 3.13 from this one on.
LOWEST = RAYS[0] if sys.version_info < (3, 13) else "2.48.0"


def install_lowest(python: Path) -> Path:
    """Puts the lowest Ray alone into a folder that goes before the environment's own: what else it needs is there."""
    folder = ROOT / ".venv-lowest"
    if not (folder / f"ray-{LOWEST}.dist-info").exists():
        run(python, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", folder, f"ray=={LOWEST}")
    return folder


def main() -> None:
    arguments = sys.argv[1:]
    quick = "--quick" in arguments
    arguments = [argument for argument in arguments if argument != "--quick"]
    python = make_venv(ROOT / ".venv-test")
    install(python, "--editable", ".[test]")
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    pytest = [python, "-m", "pytest", *([] if quick else ["-m", ""]), *arguments]
    # In the order of collection: sorted by their number of tests, files with a few long ones would come last.
    run(*pytest, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", RAY_TRAIN_V2_ENABLED="1")
    run(*pytest, *ENGINE_TESTS, RAY_TRAIN_V2_ENABLED="0")
    run(*pytest, *SMOKE, PYTHONPATH=str(install_lowest(python)), RAY_TRAIN_V2_ENABLED="0")
    run(*pytest, "upstream/tests", RAY_TRAIN_V2_ENABLED="1")


if __name__ == "__main__":
    main()
