"""Installs the project into a virtual environment of its own and runs every test that can run on this machine.

usage: python3 ci/test.py [--quick] [PYTEST ARGUMENT ...]

--quick leaves out what takes minutes. Tests that need a GPU or root skip themselves and say so. The trainer tests run
twice, once with each engine of Ray Train.
"""

from __future__ import annotations

import sys

from common import ROOT, install, make_venv, run

ENGINE_TESTS = ("tests/ray/test_trainer.py", "tests/ray/test_demo.py")


def main() -> None:
    arguments = sys.argv[1:]
    quick = "--quick" in arguments
    arguments = [argument for argument in arguments if argument != "--quick"]
    python = make_venv(ROOT / ".venv-test")
    install(python, "--editable", ".[test]")
    pytest = [python, "-m", "pytest", *([] if quick else ["-m", ""]), *arguments]
    run(*pytest, "-n", "2", "--dist", "loadfile", RAY_TRAIN_V2_ENABLED="1")
    run(*pytest, *ENGINE_TESTS, RAY_TRAIN_V2_ENABLED="0")


if __name__ == "__main__":
    main()
