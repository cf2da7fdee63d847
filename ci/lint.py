"""ruff and mypy over the project. usage: python3 ci/lint.py"""

from __future__ import annotations

import sys

from common import run


def main() -> None:
    run(sys.executable, "-m", "ruff", "check", ".")
    run(sys.executable, "-m", "ruff", "format", "--check", ".")
    for platform in ("linux", "win32", "darwin"):
        run(sys.executable, "-m", "mypy", "--platform", platform)


if __name__ == "__main__":
    main()
