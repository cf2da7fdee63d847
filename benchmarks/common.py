"""Functions shared by the benchmarks: the environment, and one dated JSON per run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_STAMP = re.compile(r"(?P<kind>.+?)_(?P<when>\d{4}-\d{2}-\d{2}|\d{8}_\d{4})")


def environment() -> dict[str, Any]:
    """Return hardware, versions and load, so that a number can still be interpreted years later."""
    import torch

    from ray_fracbackend.decide.worker_info import version_text
    from ray_fracbackend.worker.nccl_library import loaded_nccl_version

    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": version_text(loaded_nccl_version()) if torch.cuda.is_available() else None,
        "ray": _version("ray"),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):  # such as Ray on a host where only ipc is measured
        return version(package)
    return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the option that all benchmarks have."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON (default: benchmarks/results)")
    return found


def save(name: str, out: Path, results: dict[str, Any]) -> Path:
    """Write ``NAME_YYYY-MM-DD.json`` and return its path."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}_{today}.json"
    path.write_text(json.dumps({"date": today, "environment": environment(), **results}, indent=2) + "\n")
    return path


def newest(kind: str, results: Path = RESULTS) -> Path | None:
    """Return the newest result of a kind, such as ``start_v2``, by the date in its name; None if there is none."""
    found = {
        stamp["when"].replace("-", ""): path
        for path in results.glob("*.json")
        if (stamp := _STAMP.fullmatch(path.stem)) and stamp["kind"] == kind
    }
    return found[max(found)] if found else None


def machine_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return hardware and versions of a result; results of ipc had other keys until 2026-11-26."""
    if "environment" in result:
        found: dict[str, Any] = result["environment"]
        return found
    hardware, versions = result["hardware"], result["versions"]
    return {**hardware, **versions, "num_cpus": hardware["cores"]}


def where(result: dict[str, Any]) -> str:
    """Return date, hardware and versions of a result, for a caption."""
    machine = machine_of(result)
    gpus = f", {', '.join(machine['gpus']) or 'no GPU'}" if "gpus" in machine else ""
    ray = f", Ray {machine['ray']}" if "ray" in machine else ""
    return f"{result['date'][:10]}, {machine['cpu']}, {machine['num_cpus']} cores{gpus}, torch {machine['torch']}{ray}"
