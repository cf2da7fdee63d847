"""Test versions of Ray with this environment's torch and Python; `nox -s matrix` runs it for each pair.

usage: python ci/matrix.py --torch VERSION [--ray VERSION ...]

Installs each Ray and the project into the environment that runs it, and runs a few tests with every engine of this Ray. Writes
one JSON line per cell to ci/matrix_results.jsonl, replacing the earlier line of the cell. If a version cannot be
installed because a wheel does not exist, this is reported and is not a failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from typing import Any

from common import ROOT

RESULTS = ROOT / "ci" / "matrix_results.jsonl"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RAYS = ("2.40.0", "2.44.1", "2.48.0", "2.52.1", "2.56.1", "2.60.0")
# The oldest supported version, the version that the tests use, and newer ones.
TORCHES = ("2.4.1", "2.13.0", "2.14.1", "2.15.0")
# A start on logical GPUs, and a start that fails.
SMOKE = (
    "tests/ray/test_trainer.py::test_gpu_script_on_the_cpu",
    "tests/ray/test_trainer.py::test_missing_cuda_is_an_error_by_default",
)
_ENGINES = {"v1": "0", "v2": "1"}
_NO_WHEEL = re.compile(r"No matching distribution found for (\S+)")
_CONFLICT = re.compile(r"The conflict is caused by:\n((?: {4}.+\n)+)")
_FACTS = """
import json, os, sys, ray, torch
import ray.train
nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
print(json.dumps({
    "ray": ray.__version__, "torch": torch.__version__, "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, nccl)) if nccl else None, "devices": torch.cuda.device_count(),
    "v2": hasattr(ray.train, "UserCallback"),
}))
"""


def key_of(cell: dict[str, Any]) -> tuple[str, str, str]:
    """Return the identity of a cell: Python series, requested torch, Ray."""
    return cell["python"], cell["torch_asked"], cell["ray"]


def read() -> list[dict[str, Any]]:
    """Return all cells that have been tested."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def record(cell: dict[str, Any]) -> None:
    """Write one cell, replacing its earlier line."""
    cells = {key_of(known): known for known in read()}
    cells[key_of(cell)] = cell
    lines = [json.dumps(cells[key]) for key in sorted(cells, key=_numbers)]
    RESULTS.write_text("\n".join(lines) + "\n")


def _numbers(key: tuple[str, str, str]) -> list[list[int]]:
    return [[int(number) for number in version.split(".")] for version in key]


def why_not_installed(pip_errors: str) -> str | None:
    """Return pip's reason if wheels are missing or exclude each other, None for another failure."""
    if found := _NO_WHEEL.search(pip_errors):
        return f"no wheel of {found[1]}"
    if found := _CONFLICT.search(pip_errors):
        return "conflict: " + "; ".join(line.strip() for line in found[1].splitlines())
    return None


def try_cell(torch: str, ray: str) -> dict[str, Any]:
    """Install one combination and run the smoke tests with each of its engines."""
    series = "{}.{}".format(*sys.version_info[:2])
    cell: dict[str, Any] = {"python": series, "torch_asked": torch, "ray": ray, "result": "passed"}
    cell["date"] = datetime.date.today().isoformat()
    cell["system"] = f"{platform.system()} {platform.machine()}"
    print(f"=== Python {series}, torch {torch}, Ray {ray}", flush=True)
    packages = [f"torch=={torch}", f"ray[train]=={ray}", str(ROOT), "pytest", "pytest-timeout"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reason = why_not_installed(done.stderr)
        if reason is None:
            raise SystemExit(f"pip failed:\n{done.stderr[-3000:]}")
        return {**cell, "result": "not installable", "reason": reason}
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1"}
    facts = subprocess.run([sys.executable, "-c", _FACTS], env=environment, capture_output=True, text=True, check=True)
    cell.update(json.loads(facts.stdout.splitlines()[-1]))
    for engine in ("v1", "v2") if cell.pop("v2") else ("v1",):
        cell[engine] = try_engine(engine)
        if cell[engine] != "passed":
            cell["result"] = "failed"
    return cell


def try_engine(engine: str) -> str:
    """Return ``passed`` or the failure."""
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": _ENGINES[engine]}
    commands = [["-m", "pytest", "--quiet", "--full", *SMOKE], ["ci/start_smoke.py", "--once"]]
    for command in commands:
        print(f"--- {engine}: {' '.join(command)}", flush=True)
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            print(done.stdout, flush=True)
            failed = re.findall(r"^(?:FAILED|ERROR) \S*::(\S+)", done.stdout, flags=re.MULTILINE)
            return f"failed: {', '.join(failed) or ' '.join(command)}"
    return "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True)
    parser.add_argument("--ray", nargs="+", default=RAYS)
    options = parser.parse_args()
    failed = []
    for ray in options.ray:
        cell = try_cell(options.torch, ray)
        record(cell)
        print(json.dumps(cell), flush=True)
        if cell["result"] == "failed":
            failed.append(ray)
    if failed:
        raise SystemExit(f"failed with Ray {', '.join(failed)}")


if __name__ == "__main__":
    main()
