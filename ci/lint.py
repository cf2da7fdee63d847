"""ruff and mypy over the project. usage: python3 ci/lint.py"""

from __future__ import annotations

import sys

from common import ROOT, run


def main() -> None:
    run(sys.executable, "-m", "ruff", "check", ".")
    run(sys.executable, "-m", "ruff", "format", "--check", ".")
    run(sys.executable, "-m", "mypy", "--platform", "linux")
    # The ipc backend runs on Linux alone.
    package = ROOT / "ray_fracbackend"
    everywhere = sorted(set(package.rglob("*.py")) - set(package.glob("ipc/**/*.py")))
    for platform in ("win32", "darwin"):
        run(sys.executable, "-m", "mypy", "--platform", platform, "--follow-imports", "silent", *everywhere)


if __name__ == "__main__":
    main()
