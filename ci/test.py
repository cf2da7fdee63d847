"""Install the project into a virtual environment of its own and run its tests.

usage: python3 ci/test.py [--full] [PYTEST ARGUMENT ...]

The default suite takes minutes: a start whole, other ways to it (run, callback, RLlib, torchrun) in part. --full runs everything that can run on this machine: all
parameters, long runs, both engines of Ray Train, the lowest supported Ray, and with no further argument the patches for Ray,
everything on CUDA tensors (ci/cuda.py --steps) and the first cell of ci/wine.py, where these can run. Tests that lack a GPU, root or a package skip themselves and say so.
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
from wine import CELLS
from wine_setup import why_not

V1_TESTS = (
    *(
        f"tests/ray/test_{name}.py"
        for name in ("trainer", "run", "jobs", "checkpoint", "training_libraries", "demo", "tune")
    ),
    "tests/faults/test_faults.py",
)
# c10d's stores ask for the name of every peer: a slow name server must not stop a test for longer than this.
RESOLVER = "timeout:1"
# Exit codes of pytest that are no failure: passed; and nothing to run, where arguments such as -k chose the tests.
GOOD = (0, 5) if set(sys.argv[1:]) - {"--full"} else (0,)
# Ray has wheels for Python 3.13 from this one on.
LOWEST = RAYS[0] if sys.version_info < (3, 13) else "2.48.0"


def install_lowest(python: Path) -> Path:
    """Install the lowest Ray alone into a folder that goes before the environment's own, which has what else it needs."""
    folder = ROOT / ".venv-lowest"
    if not (folder / f"ray-{LOWEST}.dist-info").exists():
        run(python, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", folder, f"ray=={LOWEST}")
    return folder


def main() -> None:
    python = make_venv(ROOT / ".venv-test")
    install(python, "--editable", ".[test]")
    lowest = install_lowest(python)
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    pytest = [python, "-m", "pytest", *sys.argv[1:]]
    smoke = SMOKE if "--full" in sys.argv else SMOKE[:1]
    started = time.perf_counter()
    # One process more than there are cores: tests wait a fifth of their time.
    cores = os.cpu_count() or 2
    failed = call(*pytest, *spread(cores + 1), RAY_TRAIN_V2_ENABLED="1") not in GOOD
    side_by_side = (
        [([*pytest, *spread(cores), *V1_TESTS], {"RAY_TRAIN_V2_ENABLED": "0"})],
        [([*pytest, *smoke], {"RAY_TRAIN_V2_ENABLED": "0", "PYTHONPATH": str(lowest)})],
    )
    with ThreadPoolExecutor(len(side_by_side)) as pool:
        failed |= any(list(pool.map(call_quietly, side_by_side)))
    if sys.argv[1:] == ["--full"]:
        failed |= call(python, "upstream/check.py") != 0
        failed |= cuda_failed()
        failed |= windows_failed()
    print(f"tests: {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        sys.exit("tests failed, see above")


def cuda_failed() -> bool:
    """Run everything on CUDA tensors on emulated GPUs; False where this machine cannot, which is said."""
    return call(sys.executable, "ci/cuda.py", "--libraries", "--steps") not in (0, NOT_RUN)


def windows_failed() -> bool:
    """Run what runs on Windows under Wine, with nothing beside it; False where this machine cannot, which is said."""
    if reason := why_not():
        print(f"ci/wine.py: not run: {reason}", flush=True)
        return False
    return call(sys.executable, "ci/wine.py", "--versions", *CELLS[0]) != 0


def spread(num_processes: int) -> list[str]:
    """Options for files of tests over so many processes, in the order of collection: sorted by their number of tests, files with
    a few long ones would come last."""
    return ["-n", str(num_processes), "--dist", "loadfile", "--no-loadscope-reorder"]


def call_quietly(passes: list[tuple[list[str | Path], dict[str, str]]]) -> bool:
    """Run one after the other and show the output of each when it has ended, so that two at a time stay apart."""
    failed = False
    for command, env in passes:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            failed |= call(*command, output=output, **env) not in GOOD
            output.seek(0)
            print(output.read(), flush=True)
    return failed


if __name__ == "__main__":
    main()
