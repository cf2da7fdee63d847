"""Install the project into a separate virtual environment and run its tests.

usage: python3 ci/test.py [--full]                    all tests
       python3 ci/test.py [--full] PYTEST ARGUMENT ...  one run of pytest, with its exit code; RAY_TRAIN_V2_ENABLED chooses the engine

The default suite takes minutes. It tests a start completely and other ways to it (run, callback, RLlib, torchrun) in part. --full runs
everything that can run here without changing the system: all parameters, long runs, both engines of Ray Train, the lowest supported
Ray, the linters, the patches for Ray, and all steps on CUDA tensors (ci/cuda.py --steps). ci/wine.py, which installs packages as root, is a separate
command. Tests that need a missing GPU, root or a package are skipped with the reason.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import NOT_RUN, ROOT, call, install, make_venv, run
from matrix import RAYS, SMOKE

V1_TESTS = (
    *(
        f"tests/ray/test_{name}.py"
        for name in ("trainer", "run", "jobs", "checkpoint", "huggingface", "lightning", "demo", "tune")
    ),
    "tests/faults/test_faults.py",
)
# c10d's stores look up the name of every peer; a slow name server must not delay a test for longer than this.
RESOLVER = "timeout:1"
# Ray has wheels for Python 3.13 from this version on.
LOWEST = RAYS[0] if sys.version_info < (3, 13) else "2.48.0"


def install_lowest(python: Path) -> Path:
    """Install only the lowest Ray, into a folder that precedes the environment's packages on the path."""
    folder = ROOT / ".venv-lowest"
    if not (folder / f"ray-{LOWEST}.dist-info").exists():
        run(python, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", folder, f"ray=={LOWEST}")
    return folder


def main() -> None:
    python = make_venv(ROOT / ".venv-test")
    install(python, "--editable", ".[test]")
    lowest = install_lowest(python)
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile the package
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    pytest = [python, "-m", "pytest", *sys.argv[1:]]
    if set(sys.argv[1:]) - {"--full"}:
        sys.exit(call(*pytest))
    full = "--full" in sys.argv
    smoke = SMOKE if full else SMOKE[:1]
    started = time.perf_counter()
    # One process more than cores, because tests wait for a fifth of their time.
    cores = os.cpu_count() or 2
    failed = call(*pytest, *spread(cores + 1), RAY_TRAIN_V2_ENABLED="1") != 0
    side_by_side = [([*pytest, "--full", *smoke], {"PYTHONPATH": str(lowest)})]
    if full:
        side_by_side.append(([*pytest, *spread(cores), *V1_TESTS], {}))
    with ThreadPoolExecutor(len(side_by_side)) as pool:
        failed |= any(list(pool.map(call_quietly, *zip(*side_by_side, strict=True))))
    if full:
        failed |= call(python, "ci/lint.py") != 0
        failed |= call(python, "upstream/check.py") != 0
        failed |= cuda_failed()
    print(f"tests: {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        sys.exit("tests failed, see above")


def cuda_failed() -> bool:
    """Run all steps on CUDA tensors on emulated GPUs; print the reason and return False if this machine cannot."""
    return call(sys.executable, "ci/cuda.py", "--libraries", "--steps") not in (0, NOT_RUN)


def spread(num_processes: int) -> list[str]:
    """Return options to spread files of tests over processes in collection order.

    Sorted by number of tests, files with a few long tests would come last.
    """
    return ["-n", str(num_processes), "--dist", "loadfile", "--no-loadscope-reorder"]


def call_quietly(command: list[str | Path], env: dict[str, str]) -> bool:
    """Run a command with Ray Train V1 and show its output at the end, so two at a time do not mix. Return whether it failed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        failed = call(*command, output=output, RAY_TRAIN_V2_ENABLED="0", **env) != 0
        output.seek(0)
        print(output.read(), flush=True)
    return failed


if __name__ == "__main__":
    main()
