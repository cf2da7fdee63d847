"""Test versions of Ray with this environment's torch and Python; `nox -s matrix` runs it for each pair.

usage: python ci/matrix.py --torch VERSION [--ray VERSION ...]

Installs each Ray and the project into the environment that runs it, and runs a few tests with every engine of this Ray. Each
result replaces the earlier one of these versions in ci/matrix_results.jsonl and in the table of docs/compatibility.md. If a
version cannot be installed because a wheel does not exist, this is reported and is not a failure.
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

from common import ROOT, call

RESULTS = ROOT / "ci" / "matrix_results.jsonl"
PAGE = ROOT / "docs" / "compatibility.md"
_BEGIN, _END = "<!-- table: ci/matrix.py -->\n", "<!-- end of the table -->"
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


def record(cell: dict[str, Any]) -> None:
    """Write one cell, replacing its earlier line, and the table of the page."""
    cells = {key_of(known): known for known in map(json.loads, RESULTS.read_text().splitlines())}
    cells[key_of(cell)] = cell
    cells = {key: cells[key] for key in sorted(cells, key=_numbers)}
    RESULTS.write_text("".join(f"{json.dumps(each)}\n" for each in cells.values()))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}\n{table(cells)}\n\n{_END}{after}", encoding="utf-8")


def _numbers(key: tuple[str, str, str]) -> list[list[int]]:
    return [[int(number) for number in version.split(".")] for version in key]


def table(cells: dict[tuple[str, str, str], dict[str, Any]]) -> str:
    """Return one row per Python and torch, with one column per Ray."""
    rows = [["Python", "torch", "CUDA, NCCL in it", *(f"Ray {ray}" for ray in RAYS)], ["---"] * (3 + len(RAYS))]
    for python, torch in dict.fromkeys(key[:2] for key in cells):
        row = [cells.get((python, torch, ray), {}) for ray in RAYS]
        built = next((cell for cell in row if "torch" in cell), {"torch": torch})
        cuda = f"CUDA {built['cuda']}, NCCL {built['nccl']}" if built.get("cuda") else "neither"
        rows.append([python, built["torch"], cuda if "cuda" in built else "-", *map(_shown, row)])
    dates = sorted(cell["date"] for cell in cells.values())
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"Run on {cells[max(cells)]['system']}, {dates[0]} to {dates[-1]}."])


def _shown(cell: dict[str, Any]) -> str:
    if cell.get("result") == "passed":
        return ", ".join(engine.upper() for engine in _ENGINES if engine in cell)
    return "no wheel" if cell.get("result") == "not installable" else cell.get("result", "not run")


def try_cell(torch: str, ray: str) -> dict[str, Any]:
    """Install one combination and run the tests with each of its engines."""
    series = "{}.{}".format(*sys.version_info[:2])
    cell: dict[str, Any] = {"python": series, "torch_asked": torch, "ray": ray, "result": "passed"}
    cell["date"] = datetime.date.today().isoformat()
    cell["system"] = f"{platform.system()} {platform.machine()}"
    print(f"=== Python {series}, torch {torch}, Ray {ray}", flush=True)
    packages = [f"torch=={torch}", f"ray[train]=={ray}", f"{ROOT}[demo]", "pytest", "pytest-timeout"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        missing = _NO_WHEEL.search(done.stderr)
        if missing is None:
            raise SystemExit(f"pip failed:\n{done.stderr[-3000:]}")
        return {**cell, "result": "not installable", "reason": f"no wheel of {missing[1]}"}
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1"}
    facts = subprocess.run([sys.executable, "-c", _FACTS], env=environment, capture_output=True, text=True, check=True)
    cell.update(json.loads(facts.stdout.splitlines()[-1]))
    for engine in ("v1", "v2") if cell.pop("v2") else ("v1",):
        commands = (("pytest", "--quiet", "--full", *SMOKE), ("ray_fracbackend", "demo"))
        codes = [call(sys.executable, "-m", *each, RAY_TRAIN_V2_ENABLED=_ENGINES[engine]) for each in commands]
        cell[engine] = "failed" if any(codes) else "passed"
        if any(codes):
            cell["result"] = "failed"
    return cell


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
